"""IterableFeed: a feed of the batches of an iterator."""

import functools
import itertools
import json
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
from jax.sharding import Sharding

from mlax.train.feeds._batch import (
    Batch,
    BatchSpec,
    add_mask,
    as_batch,
    batch_spec,
    check_spec,
    count_items,
    describe_example,
    int_at_least,
    start_step,
)
from mlax.train.feeds._device_put import BatchPlacer, check_sharding
from mlax.train.feeds._prefetch import END, BatchIterator, PlacedBatch, Position


class IterableFeed:
    """A feed of the batches that an iterator gives: dicts of arrays, of the size of the first one.

    ```python
    feed = train.IterableFeed(lambda: read_batches("corpus"))  # a function that makes the iterator
    feed = train.IterableFeed(grain_dataset.batch(64))         # or anything that can be iterated over again
    stream = feed.stream(position=saved)                   # goes on behind the batch after which it was saved:
    saved = stream.position()
    ```

    At its end the iterator is made again. A shorter batch, as the last one may be, is filled up with rows that are
    False in "mask". The place in the data belongs to the stream and is no function of the step: `stream.position()` is
    that of the batch handed out last, whatever was read ahead, and JSON can hold it. Grain's iterators, Hugging Face's
    IterableDataset and torchdata's loaders say their own state; others are read and dropped up to the place. Every
    process is to be given the whole batches, of which its devices take their rows.

    steps  batches in a pass, if it is known
    """

    def __init__(
        self,
        make: Any,
        *,
        steps: int | None = None,
        ahead: int = 2,
        sharding: Sharding | None = None,
    ):
        if isinstance(make, Iterator):
            raise TypeError(
                f"IterableFeed: a {type(make).__name__} is used up after one pass; "
                "give a function that makes it: IterableFeed(lambda: ...)."
            )
        if not callable(make) and not hasattr(make, "__iter__"):
            raise TypeError(
                f"IterableFeed: a {type(make).__name__} is not iterable; give a function that makes an iterator."
            )
        self._make: Callable[[], Any] = make if callable(make) else lambda: make
        self.steps = None if steps is None else int_at_least(1, steps, "IterableFeed: steps")
        self.ahead = int_at_least(1, ahead, "IterableFeed: ahead")
        self.sharding = check_sharding(sharding, 0, "IterableFeed")  # the size of a batch is not known yet

    @functools.cached_property
    def specs(self) -> tuple[BatchSpec]:
        """The shapes and dtypes of a batch: those of the first."""
        first = read_batches(self._make, 0, None, again=True)
        given, _ = next(first)
        first.close()
        batch = as_batch(given, "IterableFeed: the iterator")
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
        stacked: int = 1,
        stopped: Callable[[], bool] | None = None,
        position: Position | None = None,
    ) -> BatchIterator:
        """As Feed.stream. `start` alone reads and drops the batches before; `position` goes on where it was."""
        start = start_step(start, position, "stream")
        return self._stream(start, count_items(start, stop, stacked, "stream"), stacked, stopped, position, again=True)

    def epoch(self, *, stopped: Callable[[], bool] | None = None) -> BatchIterator:
        """The batches of one pass, on the devices."""
        return self._stream(0, None, 1, stopped, None, again=False)

    def __repr__(self):
        pass_ = "" if self.steps is None else f", {self.steps:,} a pass"
        return f"IterableFeed({describe_example(self.example)}; batches of {_num_rows(self.example)}{pass_})"

    def _stream(
        self,
        start: int,
        total: int | None,
        stacked: int,
        stopped: Callable[[], bool] | None,
        position: Position | None,
        again: bool,
    ) -> BatchIterator:
        batches = read_batches(self._make, start, position, again)
        placing = BatchPlacer(self.sharding, stacked)

        def made(number: int) -> PlacedBatch | Any:
            host: list[Batch] = []
            after: Position = {}
            rows = placing.rows(self.example)
            for step in range(start + number * stacked, start + (number + 1) * stacked):
                try:
                    given, after = next(batches, (END, after))
                    if given is END:
                        return END
                    whole = self._filled(given)
                except Exception as error:
                    error.add_note(f"in batch number {step} of the iterator")
                    raise
                # a copy, since many an iterator gives one buffer again and again
                host.append({name: np.array(array[rows]) for name, array in whole.items()})
            return placing.put(host, self.example, rows), after

        return BatchIterator(
            made,
            total=total,
            threads=1,
            ahead=self.ahead,
            stopped=stopped,
            position=position or {"step": start},
            ended=batches.close,
        )

    def _filled(self, given: Any) -> Batch:
        batch = as_batch(given, "IterableFeed: the iterator")
        rows, wanted = _num_rows(batch), _num_rows(self.example)
        if not 0 < rows <= wanted:
            raise ValueError(
                f"IterableFeed: a batch has {rows} rows; it needs 1 to {wanted}, as many as the first had."
            )
        index = np.arange(wanted) % rows
        batch = {name: array if rows == wanted else array[index] for name, array in batch.items()}
        return check_spec(
            add_mask(batch, np.arange(wanted) < rows, "IterableFeed"), self.example, "IterableFeed: the iterator"
        )


def _num_rows(batch: Any) -> int:
    return next(iter(batch.values())).shape[0]


def read_batches(
    make: Callable[[], Any], step: int, position: Position | None, again: bool
) -> Generator[tuple[Any, Position]]:
    """The batches of what `make` makes, each with the position after it; made again at its end, if `again`.

    From `position` on if it says a place, else from the batch of number `step` on: a stream that has given no batch
    yet knows no more than the step, and `step` batches are read and dropped. Where an iterator can say its state,
    that is the position: `get_state` and `set_state` (Grain), or `state_dict` and `load_state_dict` on what is iterated
    over (Hugging Face, torchdata). Otherwise batches are counted and, to come back, read and dropped. What has
    `set_epoch` is told the number of the pass, by which it may shuffle.
    """
    place = position if position and not {"pass", "taken", "state"}.isdisjoint(position) else {"taken": step}
    state, drop = place.get("state"), place.get("taken", 0)
    for number in itertools.count(place.get("pass", 0)):
        made = make()
        if hasattr(made, "set_epoch"):
            made.set_epoch(number)
        if state is not None and hasattr(made, "load_state_dict"):
            made.load_state_dict(_decode_state(state))
        iterator = iter(made)
        if state is not None and not hasattr(made, "load_state_dict"):
            iterator.set_state(_decode_state(state))  # pyright: ignore[reportAttributeAccessIssue]
        taken = 0
        try:
            for batch in iterator:
                taken += 1
                if drop:
                    drop -= 1
                    continue
                step += 1
                yield batch, {"step": step, "pass": number, **_iterator_state(made, iterator, taken)}
        finally:
            if hasattr(iterator, "close"):
                iterator.close()  # pyright: ignore[reportAttributeAccessIssue]
        if taken == 0 and state is None:
            raise ValueError("IterableFeed: the iterator is empty; it needs at least one batch.")
        if not again:
            return
        state = None


def _iterator_state(made: Any, iterator: Any, taken: int) -> Position:
    """Where `iterator` stands, in a form that JSON can hold and that does not change when it goes on."""
    if hasattr(made, "load_state_dict"):
        state = made.state_dict()
    elif hasattr(iterator, "get_state"):
        state = iterator.get_state()
    else:
        return {"taken": taken}
    if isinstance(state, bytes):
        return {"state": {"bytes": state.decode("latin-1")}}
    try:
        return {"state": json.loads(json.dumps(state))}
    except TypeError as error:
        error.add_note(f"IterableFeed: the state of {type(iterator).__name__} is not JSON: {state!r}")
        raise


def _decode_state(state: Any) -> Any:
    return state["bytes"].encode("latin-1") if isinstance(state, dict) and set(state) == {"bytes"} else state
