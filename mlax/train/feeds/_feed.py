"""Feed: batches of fixed shapes from a source, as a function of the seed and the step."""

import contextlib
import functools
from collections.abc import Callable, Iterator
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
from mlax.train.feeds._device_put import BatchPlacer, RowIndex, check_sharding
from mlax.train.feeds._prefetch import BatchIterator, LoadedBatch, Position, count_items, start_step
from mlax.train.feeds._shuffle import epoch_ids, pad_ids
from mlax.train.feeds._source import as_source, stack_examples

Transform = Callable[[Batch, np.random.Generator], Any]


class Feed(metaclass=Documented):
    """A data loader: batches of `batch` examples of `source`, without end; each epoch has every example once, shuffled
    by `seed`.

    ```python
    feed = train.Feed({"image": images, "digit": digits}, batch=64, seed=0)
    for batch in feed.stream(stop=1_000):  # {"digit": (64,), "image": (64, 8, 8), "mask": (64,)}, on the device
        ...
    ```

    `source` is a dict of arrays (in memory or memory-mapped), a Hugging Face dataset, or any `train.Source`. The batch
    of a step is a function of the seed and the step alone, so training resumes from the step, on any number of devices
    and processes. Without a seed the examples are in order.

    A batch is a dict of arrays with a leading axis of `batch`, and a bool "mask". The last batch of an epoch is padded
    with other examples of the epoch, whose mask is False: they do not count in the loss, while layers that mix
    examples, like BatchNorm, see an ordinary batch. A "mask" from the source is kept for the other examples: it marks
    which examples, or entries of them, count in the loss, so a segmentation target needs another name.

    map_example  map_example(example, generator) -> example, for arrays without the batch axis. Its generator is seeded
                 by the seed, the epoch and the id of the example.
    map_batch    map_batch(batch, generator) -> batch, for a whole batch, after `map_example`. Its generator is seeded
                 by the seed and the step. With it every process loads whole batches; otherwise only the rows it needs.
    workers      threads that load; 1 for a source that is not thread-safe
    prefetch     batches to prefetch, ready or in progress, while a step runs
    sharding     of the batches: a `jax.sharding.Sharding` of (b, ...), truncated to the rank of each array
    """

    _listed = ("stream", "epoch", "batch_at", "steps", "example")  # by `help`

    def __init__(
        self,
        source: Any,
        batch: int,
        *,
        seed: int | None = None,
        map_example: Transform | None = None,
        map_batch: Transform | None = None,
        workers: int = 2,
        prefetch: int = 2,
        sharding: Sharding | None = None,
    ):
        self.batch = int_at_least(1, batch, "Feed: batch")
        self.seed = None if seed is None else int_at_least(0, seed, "Feed: seed")
        self.workers = int_at_least(1, workers, "Feed: workers")
        self.prefetch = int_at_least(1, prefetch, "Feed: prefetch")
        self.map_example, self.map_batch = map_example, map_batch
        self.sharding = check_sharding(sharding, batch, "Feed")
        self.source = as_source(source)

    @property
    def steps(self) -> int:
        """Batches per epoch."""
        return -(-len(self.source) // self.batch)

    @functools.cached_property
    def specs(self) -> tuple[BatchSpec, ...]:
        """The shapes and dtypes of every kind of batch: one here, one for each bucket in Buckets."""
        with note_batch(0, self.indices(0)):
            return (batch_spec(self._make_batch(0, 0, self.indices(0), slice(None))),)

    @property
    def example(self) -> BatchSpec:
        """The shapes and dtypes of a batch; of the first kind, if there are several."""
        return self.specs[0]

    def indices(self, step: int) -> np.ndarray:
        """The ids of the examples of a step, (batch,) int64; -1 on padding rows."""
        epoch, step = divmod(int_at_least(0, step, "Feed: step"), self.steps)
        start, stop = step * self.batch, min((step + 1) * self.batch, len(self.source))
        return pad_ids(epoch_ids(len(self.source), self.seed, epoch, start, stop), self.batch)

    def padded_indices(self, step: int) -> np.ndarray:
        """Like `indices`, with the ids of the examples that fill padding rows, which BatchNorm's statistics include."""
        return self._fill_padding(step, self._spec_index(step), self.indices(step))

    def batch_at(self, step: int) -> Batch:
        """The batch of a step, as NumPy arrays on the host."""
        return self._load(step, slice(None))

    def stream(
        self,
        start: int | None = None,
        stop: int | None = None,
        *,
        steps_per_call: int = 1,
        stopped: Callable[[], bool] | None = None,
        position: Position | None = None,
    ) -> BatchIterator:
        """The batches of steps `start` (0) to `stop` (None: without end) on the devices, prefetched by threads.

        Each item is `steps_per_call` batches along a new leading axis, if that is more than 1. While waiting for data,
        `stopped()` is called every 50 ms, and True ends the stream. `position` is what `stream.position()` returned,
        in place of `start`.
        """
        start = start_step(start, position)
        total = count_items(start, stop, steps_per_call)
        if steps_per_call > 1 and self._num_specs > 1:
            raise ValueError(
                f"stream: steps_per_call={steps_per_call} needs batches of one shape, but {self} has {self._num_specs}."
            )
        placer = BatchPlacer(self.sharding, steps_per_call)

        def load(step: int) -> LoadedBatch:
            spec = self.specs[self._spec_index(step)]
            rows = placer.rows(spec)
            return LoadedBatch(self._load(step, rows), spec, rows, {"step": step + 1})

        return BatchIterator(
            load,
            placer,
            start=start,
            total=total,
            threads=self.workers,
            prefetch=self.prefetch,
            stopped=stopped,
            position={"step": start},
        )

    def epoch(self, number: int = 0, *, stopped: Callable[[], bool] | None = None) -> BatchIterator:
        """The batches of one epoch, on the devices."""
        return self.stream(number * self.steps, (number + 1) * self.steps, stopped=stopped)

    def __repr__(self):
        order = "in order" if self.seed is None else f"shuffled by seed {self.seed}"
        batches = f"batches of {self.batch}, {self.steps:,} per epoch"
        return f"{type(self).__name__}({self._describe_source()}; {batches}, {order})"

    def _describe_source(self) -> str:
        return f"{len(self.source):,} examples of {describe_example(self.example)}"

    _num_specs = 1  # len(self.specs), without reading the source

    def _spec_index(self, step: int) -> int:
        """Which of `specs` the batch of a step has."""
        return 0

    def _read(self, spec_index: int, ids: np.ndarray) -> Any:
        return self.source[ids]

    def _filler_ids(self, step: int, spec_index: int) -> np.ndarray:
        """The ids of examples to pad a batch with: the first ones of the epoch."""
        return epoch_ids(len(self.source), self.seed, step // self.steps, 0, min(self.batch, len(self.source)))

    def _fill_padding(self, step: int, spec_index: int, ids: np.ndarray) -> np.ndarray:
        if (padding := ids < 0).any():
            return np.where(padding, np.resize(self._filler_ids(step, spec_index), len(ids)), ids)
        return ids

    def _load(self, step: int, rows: RowIndex) -> Batch:
        """Some rows of the batch of a step."""
        ids, spec_index = self.indices(step), self._spec_index(step)
        spec = self.specs[spec_index]
        with note_batch(step, ids):
            return check_spec(self._make_batch(step, spec_index, ids, rows), spec, "Feed: the source")

    def _make_batch(self, step: int, spec_index: int, ids: np.ndarray, rows: RowIndex) -> Batch:
        padding, ids = ids < 0, self._fill_padding(step, spec_index, ids)
        needed = rows if self.map_batch is None else slice(None)
        valid, ids = ~padding[needed], ids[needed]
        batch = _check_rows(len(ids), self._read(spec_index, ids), "Feed: the source")
        if self.map_example is not None:
            epoch = step // self.steps
            examples = [{name: array[i] for name, array in batch.items()} for i in range(len(ids))]
            examples = [
                self.map_example(one, self._generator(1, epoch, i)) for one, i in zip(examples, ids, strict=True)
            ]
            batch = dict(stack_examples(examples, "Feed: map_example"))
        if self.map_batch is None:
            return add_mask(batch, valid, "Feed")
        batch = _check_rows(len(ids), self.map_batch(batch, self._generator(2, step)), "Feed: map_batch")
        return {name: array[rows] for name, array in add_mask(batch, valid, "Feed").items()}

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed or 0, spawn_key=key))


@contextlib.contextmanager
def note_batch(step: int, ids: np.ndarray) -> Iterator[None]:
    """Add the step and the ids of the batch to errors, as a note."""
    try:
        yield
    except Exception as error:
        real = [str(i) for i in ids if i >= 0]
        more = f" and {len(real) - 16} more" if len(real) > 16 else ""
        error.add_note(f"in the batch of step {step}, examples {', '.join(real[:16])}{more}")
        raise


def _check_rows(n: int, value: Any, origin: str) -> Batch:
    batch = as_batch(value, origin)
    if (rows := len(next(iter(batch.values())))) != n:
        raise ValueError(f"{origin} returned {rows} rows for {n} examples; it must return one row per example.")
    return batch
