"""Transfer batches to the devices, and find the rows that this process needs."""

import contextlib
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from mlax.place import Plan
from mlax.train.feeds._batch import Batch, BatchSpec

RowIndex = slice | np.ndarray  # all rows, or the sorted indices of some


class BatchPlacer:
    """Puts batches on the devices of `sharding`, or on the default device if it is None.

    With several `steps_per_call`, that many batches are stacked along a new leading axis.
    A NamedSharding is truncated to the rank of each array, so that P("data", "time") also applies to a mask (b,).
    """

    def __init__(self, sharding: Sharding | None, steps_per_call: int = 1):
        self.steps_per_call = steps_per_call
        self._sharding = sharding
        self._device: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]

    def rows(self, spec: BatchSpec) -> RowIndex:
        """The rows that the devices of this process hold: only these need to be loaded."""
        if self._sharding is None or self._sharding.is_fully_addressable:
            return slice(None)
        batch = next(iter(spec.values())).shape[0]
        held = np.zeros(batch, bool)
        for leaf in spec.values():
            for index in self._array_sharding(len(leaf.shape), 1).addressable_devices_indices_map(leaf.shape).values():
                held[index[0] if index else slice(None)] = True
        return np.flatnonzero(held)

    def put(self, batches: list[Batch], spec: BatchSpec, rows: RowIndex) -> dict[str, jax.Array]:
        """Transfer batches, each given as its `rows` only, to the devices."""
        local = batches[0] if self.steps_per_call == 1 else {n: np.stack([batch[n] for batch in batches]) for n in spec}
        if self._sharding is None:
            with jax.default_device(self._device) if self._device is not None else contextlib.nullcontext():
                return jax.device_put(local)
        shardings = {name: self._array_sharding(len(leaf.shape), self.steps_per_call) for name, leaf in spec.items()}
        if isinstance(rows, slice):
            return jax.device_put(local, shardings)
        lead = () if self.steps_per_call == 1 else (self.steps_per_call,)

        def shard(array: np.ndarray, index: Any) -> np.ndarray:
            first, last, _ = index[len(lead)].indices(next(iter(spec.values())).shape[0])
            here = slice(*np.searchsorted(rows, (first, last)))
            return array[(*index[: len(lead)], here, *index[len(lead) + 1 :])]

        return {
            name: jax.make_array_from_callback(
                (*lead, *leaf.shape), shardings[name], lambda index, array=local[name]: shard(array, index)
            )
            for name, leaf in spec.items()
        }

    def _array_sharding(self, rank: int, steps_per_call: int) -> Sharding:
        """The sharding of an array that has `rank` axes in a single batch."""
        if not isinstance(self._sharding, NamedSharding):
            assert self._sharding is not None
            return self._sharding
        axes = tuple(self._sharding.spec)[:rank]
        spec = PartitionSpec(*axes) if steps_per_call == 1 else PartitionSpec(None, *axes)
        return NamedSharding(self._sharding.mesh, spec, memory_kind=self._sharding.memory_kind)


def check_sharding(value: Any, batch: int, owner: str) -> Sharding | None:
    """`value` as a sharding that divides `batch` rows evenly."""
    if value is None or isinstance(value, jax.Device):
        return value and SingleDeviceSharding(value)
    if isinstance(value, Plan):
        raise TypeError(
            f"{owner}: sharding is a place.Plan, but must be that of batches alone; pass plan.batch_sharding."
        )
    if not isinstance(value, Sharding):
        raise TypeError(
            f"{owner}: sharding is a {type(value).__name__}, but must be a jax.sharding.Sharding; "
            'write NamedSharding(mesh, PartitionSpec("data")).'
        )
    axes = tuple(value.spec)[:1] if isinstance(value, NamedSharding) else ()
    rows = NamedSharding(value.mesh, PartitionSpec(*axes)) if isinstance(value, NamedSharding) else value
    devices = len(rows.device_set)
    shards = devices // rows.shard_shape((devices,))[0]
    below = batch - batch % shards
    if below != batch:
        raise ValueError(
            f"{owner}: a batch of {batch} does not divide evenly into the {shards} shards of {value}; "
            f"use batch={f'{below} or ' if below else ''}{below + shards}."
        )
    return value
