"""Buckets: batches of sequences of similar length, padded to one of a few lengths."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Sharding

from mlax.train._checks import int_at_least
from mlax.train.feeds._batch import BatchSpec, batch_spec
from mlax.train.feeds._device_put import check_sharding
from mlax.train.feeds._feed import Feed, Transform, note_batch
from mlax.train.feeds._sequences import Sequences, check_lengths
from mlax.train.feeds._shuffle import epoch_ids, pad_ids


class _Bucket(NamedTuple):
    length: int
    batch: int
    members: np.ndarray  # ids of the sequences, ascending
    first: int  # the index of its first batch among the batches of all buckets

    @property
    def steps(self) -> int:
        return -(-len(self.members) // self.batch)


class Buckets(Feed):
    """A data loader for sequences of different lengths: each is padded to the smallest of `lengths` that holds it.

    ```python
    feed = train.Buckets(sequences, lengths=(64, 128, 256), batch=32, seed=0)  # sequences: [[5, 2, 9], [7, 1], ...]
    ```

    A batch has one length: "tokens" (b, t) and "mask" (b, t), False on padding. The order of lengths is shuffled too.
    A step compiles once for each length, and `steps` is the same in every epoch. `sequences` may be a dict
    of such lists, which agree in their lengths, and arrays of fixed shape: `{"tokens": [...], "label": labels}`.

    batch  one size, or one for each length: (128, 64, 32) keeps the number of entries per batch constant
    cut    True truncates sequences longer than the last length; otherwise they are an error
    pad    the value of padding

    The rest is as in Feed; `map_example` and `map_batch` get padded sequences.
    """

    def __init__(
        self,
        sequences: Any,
        lengths: Sequence[int],
        batch: int | Sequence[int],
        *,
        seed: int | None = None,
        cut: bool = False,
        pad: Any = 0,
        map_example: Transform | None = None,
        map_batch: Transform | None = None,
        workers: int = 2,
        prefetch: int = 2,
        sharding: Sharding | None = None,
    ):
        lengths = tuple(int_at_least(1, length, "Buckets: a length") for length in lengths)
        if not lengths or sorted(set(lengths)) != list(lengths):
            raise ValueError(f"Buckets: lengths are {lengths}, but must increase: (64, 128, 256).")
        sizes = (batch,) * len(lengths) if isinstance(batch, int) else tuple(batch)
        if len(sizes) != len(lengths):
            raise ValueError(f"Buckets: {len(sizes)} batch sizes for {len(lengths)} lengths; pass one for each.")
        source = Sequences(sequences, "Buckets")
        super().__init__(
            source,
            max(int_at_least(1, size, "Buckets: batch") for size in sizes),
            seed=seed,
            map_example=map_example,
            map_batch=map_batch,
            workers=workers,
            prefetch=prefetch,
        )
        for size in sizes:
            self.sharding = check_sharding(sharding, size, "Buckets")
        self.pad = pad
        if not cut:
            check_lengths(source.lengths, lengths[-1], "Buckets", "add a larger length, or cut=True to truncate them.")
        self._buckets = _fill_buckets(np.minimum(source.lengths, lengths[-1]), lengths, sizes)
        self._num_specs = len(self._buckets)

    @property
    def steps(self) -> int:
        last = self._buckets[-1]
        return last.first + last.steps

    @functools.cached_property
    def specs(self) -> tuple[BatchSpec, ...]:
        specs: list[BatchSpec] = []
        for index, bucket in enumerate(self._buckets):
            ids = pad_ids(bucket.members[: bucket.batch], bucket.batch)
            with note_batch(0, ids):
                specs.append(batch_spec(self._make_batch(0, index, ids, slice(None))))
        return tuple(specs)

    def indices(self, step: int) -> np.ndarray:
        index, number, epoch = self._locate(step)
        return pad_ids(self._members(index, epoch, number), self._buckets[index].batch)

    def _members(self, index: int, epoch: int, number: int) -> np.ndarray:
        """The ids of batch `number` of a bucket."""
        bucket = self._buckets[index]
        start, stop = number * bucket.batch, min((number + 1) * bucket.batch, len(bucket.members))
        return bucket.members[epoch_ids(len(bucket.members), self.seed, epoch, start, stop, part=1 + index)]

    def _locate(self, step: int) -> tuple[int, int, int]:
        """The bucket of a step, which of its batches it is, and the epoch."""
        epoch, step = divmod(int_at_least(0, step, "Buckets: step"), self.steps)
        number = int(epoch_ids(self.steps, self.seed, epoch, step, step + 1)[0])
        index = int(np.searchsorted([bucket.first for bucket in self._buckets], number, side="right")) - 1
        return index, number - self._buckets[index].first, epoch

    def _spec_index(self, step: int) -> int:
        return self._locate(step)[0]

    def _read(self, spec_index: int, ids: np.ndarray) -> Any:
        return self.source.pad(ids, self._buckets[spec_index].length, self.pad)  # pyright: ignore[reportAttributeAccessIssue]

    def _filler_ids(self, step: int, spec_index: int) -> np.ndarray:
        return self._members(spec_index, step // self.steps, 0)

    def _describe_source(self) -> str:
        lengths = ", ".join(f"{len(bucket.members):,} in {bucket.length:,}" for bucket in self._buckets)
        return f"{len(self.source):,} sequences padded to the next length: {lengths}"


def _fill_buckets(lengths: np.ndarray, limits: tuple[int, ...], sizes: tuple[int, ...]) -> list[_Bucket]:
    """The buckets that are not empty."""
    of = np.searchsorted(limits, lengths)
    buckets: list[_Bucket] = []
    first = 0
    for index in np.unique(of):
        buckets.append(_Bucket(limits[index], sizes[index], np.flatnonzero(of == index), first))
        first += buckets[-1].steps
    return buckets
