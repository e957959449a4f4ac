"""IterableFeed: a feed of the batches of an iterator."""

import functools
import itertools
import json
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
from jax.sharding import Sharding

from mlax.core import Documented
from mlax.train._checks import int_at_least
from mlax.train.feeds._batch import (
    Batch,
    BatchSpec,
    add_mask,
    as_batch,
    batch_spec,
    check_spec,
    describe_example,
)
from mlax.train.feeds._device_put import BatchPlacer, check_sharding
from mlax.train.feeds._prefetch import BatchIterator, LoadedBatch, Position, count_items, start_step


class IterableFeed(metaclass=Documented):
    """A data loader over an iterator of batches: dicts of arrays, of the size of the first batch.

    ```python
    feed = train.IterableFeed(lambda: read_batches("corpus"))  # a function that makes the iterator
    feed = train.IterableFeed(grain_dataset.batch(64))         # or anything that can be iterated over repeatedly
    stream = feed.stream(position=saved)                       # continues after the batch at which it was saved:
    saved = stream.position()
    ```

    At its end the iterator is made again. A smaller batch, as the last one may be, is padded with rows whose "mask" is
    False. The position in the data belongs to the stream and is not a function of the step: `stream.position()` is that
    of the last returned batch, whatever was prefetched, and is JSON-serializable. Iterators with a state (Grain's,
    Hugging Face's IterableDataset, torchdata's loaders) are restored; others are read and dropped up to the position.
    Every process must provide whole batches; its devices take their rows.

    steps  batches per pass, if known
    """

    def __init__(
        self,
        make: Any,
        *,
        steps: int | None = None,
        prefetch: int = 2,
        sharding: Sharding | None = None,
    ):
        if isinstance(make, Iterator):
            raise TypeError(
                f"IterableFeed: a {type(make).__name__} is exhausted after one pass; "
                "pass a function that makes it: IterableFeed(lambda: ...)."
            )
        if not callable(make) and not hasattr(make, "__iter__"):
            raise TypeError(
                f"IterableFeed: a {type(make).__name__} is not iterable; pass a function that makes an iterator."
            )
        self._make: Callable[[], Any] = make if callable(make) else lambda: make
        self.steps = None if steps is None else int_at_least(1, steps, "IterableFeed: steps")
        self.prefetch = int_at_least(1, prefetch, "IterableFeed: prefetch")
        self.sharding = check_sharding(sharding, 0, "IterableFeed")  # the batch size is not known yet

    @functools.cached_property
    def specs(self) -> tuple[BatchSpec]:
        """The shapes and dtypes of a batch, taken from the first."""
        batches = _read_batches(self._make, 0, None, repeat=True)
        first, _ = next(batches)
        batches.close()
        batch = as_batch(first, "IterableFeed: the iterator")
        check_sharding(self.sharding, rows := _num_rows(batch), "IterableFeed")
        return (batch_spec(add_mask(batch, np.ones(rows, bool), "IterableFeed")),)

    @property
    def example(self) -> BatchSpec:
        """The shapes and dtypes of a batch."""
        return self.specs[0]

    def stream(
        self,
        start: int | None = None,
        stop: int | None = None,
        *,
        steps_per_call: int = 1,
        stopped: Callable[[], bool] | None = None,
        position: Position | None = None,
    ) -> BatchIterator:
        """As Feed.stream. `start` alone skips the batches before it; `position` continues where the stream was."""
        start = start_step(start, position)
        return self._stream(
            start, count_items(start, stop, steps_per_call), steps_per_call, stopped, position, repeat=True
        )

    def epoch(self, *, stopped: Callable[[], bool] | None = None) -> BatchIterator:
        """The batches of one pass, on the devices."""
        return self._stream(0, None, 1, stopped, None, repeat=False)

    def __repr__(self):
        steps = "" if self.steps is None else f", {self.steps:,} per pass"
        return f"IterableFeed({describe_example(self.example)}; batches of {_num_rows(self.example)}{steps})"

    def _stream(
        self,
        start: int,
        total: int | None,
        steps_per_call: int,
        stopped: Callable[[], bool] | None,
        position: Position | None,
        repeat: bool,
    ) -> BatchIterator:
        batches = _read_batches(self._make, start, position, repeat)
        placer = BatchPlacer(self.sharding, steps_per_call)

        def load(step: int) -> LoadedBatch | None:
            rows = placer.rows(self.example)
            try:
                if (item := next(batches, None)) is None:
                    return None
                batch = self._pad(item[0])
            except Exception as error:
                error.add_note(f"in batch number {step} of the iterator")
                raise
            arrays = {name: np.array(array[rows]) for name, array in batch.items()}  # iterators may reuse their buffers
            return LoadedBatch(arrays, self.example, rows, item[1])

        return BatchIterator(
            load,
            placer,
            start=start,
            total=total,
            threads=1,
            prefetch=self.prefetch,
            stopped=stopped,
            position=position or {"step": start},
            on_end=batches.close,
        )

    def _pad(self, value: Any) -> Batch:
        """A batch, padded to the size of the first one."""
        batch = as_batch(value, "IterableFeed: the iterator")
        rows, wanted = _num_rows(batch), _num_rows(self.example)
        if not 0 < rows <= wanted:
            raise ValueError(f"IterableFeed: a batch has {rows} rows, but must have 1 to {wanted}, like the first.")
        index = np.arange(wanted) % rows
        batch = {name: array if rows == wanted else array[index] for name, array in batch.items()}
        batch = add_mask(batch, np.arange(wanted) < rows, "IterableFeed")
        return check_spec(batch, self.example, "IterableFeed: the iterator")


def _num_rows(batch: Any) -> int:
    return next(iter(batch.values())).shape[0]


def _read_batches(
    make: Callable[[], Any], step: int, position: Position | None, repeat: bool
) -> Generator[tuple[Any, Position]]:
    """Iterate over what `make` returns: each batch, with the position after it. If `repeat`, passes follow each other.

    Starts at `position`, or at batch number `step` if it is None or only has a step, as before the first batch. The
    position has the state of the iterator if it has one: `get_state` and `set_state` (Grain), or `state_dict` and
    `load_state_dict` of the iterable (Hugging Face, torchdata). Otherwise batches are counted, and skipped to resume.
    `set_epoch`, if there is one, is called with the number of the pass, for shuffling.
    """
    place = position if position and not {"pass", "taken", "state"}.isdisjoint(position) else {"taken": step}
    state, skip = place.get("state"), place.get("taken", 0)
    for number in itertools.count(place.get("pass", 0)):
        iterable = make()
        if hasattr(iterable, "set_epoch"):
            iterable.set_epoch(number)
        if state is not None and hasattr(iterable, "load_state_dict"):
            iterable.load_state_dict(_decode_state(state))
        iterator = iter(iterable)
        if state is not None and not hasattr(iterable, "load_state_dict"):
            iterator.set_state(_decode_state(state))  # pyright: ignore[reportAttributeAccessIssue]
        count = 0
        try:
            for batch in iterator:
                count += 1
                if skip:
                    skip -= 1
                    continue
                step += 1
                yield batch, {"step": step, "pass": number, **_position_in_pass(iterable, iterator, count)}
        finally:
            if hasattr(iterator, "close"):
                iterator.close()  # pyright: ignore[reportAttributeAccessIssue]
        if count == 0 and state is None:
            raise ValueError("IterableFeed: the iterator is empty; it needs at least one batch.")
        if not repeat:
            return
        state = None


def _position_in_pass(iterable: Any, iterator: Any, count: int) -> Position:
    """The state of the iterator as JSON, which does not change as it advances; or the number of batches so far."""
    if hasattr(iterable, "load_state_dict"):
        state = iterable.state_dict()
    elif hasattr(iterator, "get_state"):
        state = iterator.get_state()
    else:
        return {"taken": count}
    if isinstance(state, bytes):
        return {"state": {"bytes": state.decode("latin-1")}}
    try:
        return {"state": json.loads(json.dumps(state))}
    except TypeError as error:
        error.add_note(f"IterableFeed: the state of {type(iterator).__name__} is not JSON-serializable: {state!r}")
        raise


def _decode_state(state: Any) -> Any:
    return state["bytes"].encode("latin-1") if isinstance(state, dict) and set(state) == {"bytes"} else state
