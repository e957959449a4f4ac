"""Feed: batches of fixed shapes from a source, in an order that is a function of the seed and the step alone."""

import contextlib
import functools
from collections.abc import Callable, Iterator
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
from mlax.train.feeds._device_put import BatchPlacer, RowIndex, check_sharding
from mlax.train.feeds._prefetch import BatchIterator, PlacedBatch, Position
from mlax.train.feeds._shuffle import epoch_ids, pad_ids
from mlax.train.feeds._source import as_source
from mlax.train.feeds._source import stack_examples as stacked_examples

Transform = Callable[[Batch, np.random.Generator], Any]


class Feed:
    """Batches of `batch` examples of `source`, without end: each epoch holds every example once, shuffled by `seed`.

    ```python
    feed = train.Feed({"image": images, "digit": digits}, batch=64, seed=0)
    for batch in feed.stream(stop=1_000):  # {"digit": (64,), "image": (64, 8, 8), "mask": (64,)}, on the device
        ...
    ```

    `source` is a dict of arrays (in memory, or memory-mapped), a Hugging Face dataset, or any `train.Source`. What a
    step holds is a function of the seed and the number of the step and of nothing else, so training goes on from the
    step alone, on any number of devices and processes. Without a seed the examples come in order.

    A batch is a dict of arrays with a leading axis of `batch` and a bool "mask". The last batch of an epoch is filled
    up with other examples of the epoch, which are False in the mask: they weigh nothing in the loss, and what mixes
    examples, as BatchNorm does, sees a batch like any other. A mask that the source gives is kept elsewhere: it says
    which examples, or entries of them, weigh in the loss, so the target of a segmentation needs another name.

    each       each(example, generator) -> example, on one example (arrays without the batch axis). Its random numbers
               belong to the seed, the epoch and the id of the example.
    transform  transform(batch, generator) -> batch, on a whole batch, after `each`. Its random numbers belong to the
               seed and the step; every process loads whole batches for it, and with `each` only the rows it holds.
    workers    threads that load; 1 for a source that only one thread may read at a time
    ahead      batches that lie ready, or in the making, while a step runs
    sharding   where batches go: a `jax.sharding.Sharding` of (b, ...), cut to the rank of each array
    """

    def __init__(
        self,
        source: Any,
        batch: int,
        *,
        seed: int | None = None,
        each: Transform | None = None,
        transform: Transform | None = None,
        workers: int = 2,
        ahead: int = 2,
        sharding: Sharding | None = None,
    ):
        self.batch = int_at_least(1, batch, "Feed: batch")
        self.seed = None if seed is None else int_at_least(0, seed, "Feed: seed")
        self.workers = int_at_least(1, workers, "Feed: workers")
        self.ahead = int_at_least(1, ahead, "Feed: ahead")
        self.each, self.transform = each, transform
        self.sharding = check_sharding(sharding, batch, "Feed")
        self.source = as_source(source)

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.source) // self.batch)

    @functools.cached_property
    def specs(self) -> tuple[BatchSpec, ...]:
        """The shapes and dtypes of every kind of batch that may come: one here, one for each bucket in Buckets."""
        with note_batch(0, self.indices(0)):
            return (batch_spec(self._made(0, 0, self.indices(0), slice(None))),)

    @property
    def example(self) -> BatchSpec:
        """The shapes and dtypes of a batch; the first kind of them, where there are several."""
        return self.specs[0]

    def indices(self, step: int) -> np.ndarray:
        """The ids of the examples of a step, (batch,) int64; -1 on the rows that only fill up the batch."""
        epoch, step = divmod(int_at_least(0, step, "Feed: step"), self.steps)
        start, stop = step * self.batch, min((step + 1) * self.batch, len(self.source))
        return pad_ids(epoch_ids(len(self.source), self.seed, epoch, start, stop), self.batch)

    def batch_at(self, step: int) -> Batch:
        """The batch of a step, as NumPy arrays on the host."""
        return self._rows_at(step, slice(None))

    def stream(
        self,
        start: int | None = None,
        stop: int | None = None,
        *,
        stacked: int = 1,
        stopped: Callable[[], bool] | None = None,
        position: Position | None = None,
    ) -> BatchIterator:
        """The batches of the steps `start` (0) to `stop` (without end), on the devices, loaded ahead by threads.

        With stacked=k each item is k batches on a new leading axis. `stopped()` is asked every 50 ms of a wait for
        data, and True ends the stream. `position` is what `stream.position()` gave, and stands for `start`.
        """
        start = start_step(start, position, "stream")
        total = count_items(start, stop, stacked, "stream")
        if stacked > 1 and self._kinds > 1:
            raise ValueError(f"stream: stacked={stacked} needs batches of one shape, but {self} has {self._kinds}.")
        placing = BatchPlacer(self.sharding, stacked)
        held = functools.cache(lambda kind: placing.rows(self.specs[kind]))  # when first needed: it may read the source

        def made(number: int) -> PlacedBatch:
            first = start + number * stacked
            kind = self._kind(first)
            rows = held(kind)
            batches = [self._rows_at(step, rows) for step in range(first, first + stacked)]
            return placing.put(batches, self.specs[kind], rows), {"step": first + stacked}

        return BatchIterator(
            made, total=total, threads=self.workers, ahead=self.ahead, stopped=stopped, position={"step": start}
        )

    def epoch(self, number: int = 0, *, stopped: Callable[[], bool] | None = None) -> BatchIterator:
        """The batches of one epoch, on the devices."""
        return self.stream(number * self.steps, (number + 1) * self.steps, stopped=stopped)

    def __repr__(self):
        order = "in order" if self.seed is None else f"shuffled by seed {self.seed}"
        return f"{type(self).__name__}({self._what()}; batches of {self.batch}, {self.steps:,} an epoch, {order})"

    def _what(self) -> str:
        return f"{len(self.source):,} examples of {describe_example(self.example)}"

    _kinds = 1  # how many `specs` there are

    def _kind(self, step: int) -> int:
        """Which of `specs` the batch of a step has."""
        return 0

    def _load(self, kind: int, ids: np.ndarray) -> Any:
        return self.source[ids]

    def _spare(self, step: int, kind: int) -> np.ndarray:
        """The ids of examples to fill up a batch with: the first ones of the epoch."""
        return epoch_ids(len(self.source), self.seed, step // self.steps, 0, min(self.batch, len(self.source)))

    def _rows_at(self, step: int, rows: RowIndex) -> Batch:
        ids, kind = self.indices(step), self._kind(step)
        spec = self.specs[kind]
        with note_batch(step, ids):
            return check_spec(self._made(step, kind, ids, rows), spec, "Feed: the source")

    def _made(self, step: int, kind: int, ids: np.ndarray, rows: RowIndex) -> Batch:
        if (spare := ids < 0).any():
            ids = np.where(spare, np.resize(self._spare(step, kind), len(ids)), ids)
        taken = rows if self.transform is None else slice(None)
        real, read = ~spare[taken], ids[taken]
        batch = _check_rows(len(read), self._load(kind, read), "Feed: the source")
        if self.each is not None:
            epoch = step // self.steps
            examples = [{name: array[i] for name, array in batch.items()} for i in range(len(read))]
            examples = [self.each(one, self._random(1, epoch, i)) for one, i in zip(examples, read, strict=True)]
            batch = dict(stacked_examples(examples, "Feed: each"))
        if self.transform is None:
            return add_mask(batch, real, "Feed")
        batch = _check_rows(len(read), self.transform(batch, self._random(2, step)), "Feed: transform")
        return {name: array[rows] for name, array in add_mask(batch, real, "Feed").items()}

    def _random(self, *key: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed or 0, spawn_key=key))


@contextlib.contextmanager
def note_batch(step: int, ids: np.ndarray) -> Iterator[None]:
    """Give an error that passes the step and the ids of the batch."""
    try:
        yield
    except Exception as error:
        real = [str(i) for i in ids if i >= 0]
        more = f" and {len(real) - 16} more" if len(real) > 16 else ""
        error.add_note(f"in the batch of step {step}, examples {', '.join(real[:16])}{more}")
        raise


def _check_rows(n: int, given: Any, giver: str) -> Batch:
    batch = as_batch(given, giver)
    if (rows := len(next(iter(batch.values())))) != n:
        raise ValueError(f"{giver} gave {rows} rows but was asked for {n}; it must give one for each example.")
    return batch
