"""Iterated: a feed from an iterator of batches that somebody else makes."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax.sharding import Sharding

from mlax.train.feeds._ahead import END
from mlax.train.feeds._batch import Batch, Spec, as_batch, described, masked, same_spec, spec_of
from mlax.train.feeds._counts import at_least, calls, first_step
from mlax.train.feeds._placing import Placing, as_sharding
from mlax.train.feeds._reading import reading
from mlax.train.feeds._stream import Made, Position, Stream


class Iterated:
    """A feed of the batches that an iterator gives: dicts of arrays, of the size of the first one.

    ```python
    feed = train.Iterated(lambda: read_batches("corpus"))  # a function that makes the iterator
    feed = train.Iterated(grain_dataset.batch(64))         # or anything that can be iterated over again
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
                f"Iterated: a {type(make).__name__} is used up after one pass; "
                "give a function that makes it: Iterated(lambda: ...)."
            )
        if not callable(make) and not hasattr(make, "__iter__"):
            raise TypeError(
                f"Iterated: a {type(make).__name__} cannot be iterated over; give a function that makes an iterator."
            )
        self._make: Callable[[], Any] = make if callable(make) else lambda: make
        self.steps = None if steps is None else at_least(1, steps, "Iterated: steps")
        self.ahead = at_least(1, ahead, "Iterated: ahead")
        self.sharding = as_sharding(sharding, 0, "Iterated")  # the size of a batch is not known yet

    @functools.cached_property
    def specs(self) -> tuple[Spec]:
        """The shapes and dtypes of a batch: those of the first."""
        first = reading(self._make, 0, None, again=True)
        given, _ = next(first)
        first.close()
        batch = as_batch(given, "Iterated: the iterator")
        as_sharding(self.sharding, rows := _rows(batch), "Iterated")
        return (spec_of(masked(batch, np.ones(rows, bool), "Iterated")),)

    @property
    def example(self) -> Spec:
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
    ) -> Stream:
        """As Feed.stream. `start` alone reads and drops the batches before; `position` goes on where it was."""
        start = first_step(start, position, "stream")
        return self._stream(start, calls(start, stop, stacked, "stream"), stacked, stopped, position, again=True)

    def epoch(self, *, stopped: Callable[[], bool] | None = None) -> Stream:
        """The batches of one pass, on the devices."""
        return self._stream(0, None, 1, stopped, None, again=False)

    def __repr__(self):
        pass_ = "" if self.steps is None else f", {self.steps:,} a pass"
        return f"Iterated({described(self.example)}; batches of {_rows(self.example)}{pass_})"

    def _stream(
        self,
        start: int,
        total: int | None,
        stacked: int,
        stopped: Callable[[], bool] | None,
        position: Position | None,
        again: bool,
    ) -> Stream:
        batches = reading(self._make, start, position, again)
        placing = Placing(self.sharding, stacked)

        def made(number: int) -> Made | Any:
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

        return Stream(
            made,
            total=total,
            threads=1,
            ahead=self.ahead,
            stopped=stopped,
            position=position or {"step": start},
            ended=batches.close,
        )

    def _filled(self, given: Any) -> Batch:
        batch = as_batch(given, "Iterated: the iterator")
        rows, wanted = _rows(batch), _rows(self.example)
        if not 0 < rows <= wanted:
            raise ValueError(f"Iterated: a batch has {rows} rows but the first had {wanted}, and none may have more.")
        index = np.arange(wanted) % rows
        batch = {name: array if rows == wanted else array[index] for name, array in batch.items()}
        return same_spec(masked(batch, np.arange(wanted) < rows, "Iterated"), self.example, "Iterated: the iterator")


def _rows(batch: Any) -> int:
    return next(iter(batch.values())).shape[0]
