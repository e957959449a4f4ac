"""Transfer batches to the devices, and find the rows that this process needs."""

import contextlib
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from mlax.place import Plan
from mlax.train.feeds._batch import Batch, BatchSpec

RowIndex = slice | np.ndarray  # all rows, or the sorted numbers of some


class BatchPlacer:
    """Puts batches where `sharding` says, `stacked` of them on a new leading axis; None is JAX's default device.

    A NamedSharding is cut to the rank of each array, so that P("data", "time") also serves a mask of shape (b,).
    """

    def __init__(self, sharding: Sharding | None, stacked: int = 1):
        self._sharding = sharding
        self._stacked = stacked
        self._device: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]

    def rows(self, spec: BatchSpec) -> RowIndex:
        """The rows that the devices of this process hold: no others have to be loaded."""
        if self._sharding is None or self._sharding.is_fully_addressable:
            return slice(None)
        batch = next(iter(spec.values())).shape[0]
        held = np.zeros(batch, bool)
        for leaf in spec.values():
            for index in self._of(len(leaf.shape), 1).addressable_devices_indices_map(leaf.shape).values():
                held[index[0] if index else slice(None)] = True
        return np.flatnonzero(held)

    def put(self, batches: list[Batch], spec: BatchSpec, rows: RowIndex) -> dict[str, jax.Array]:
        """Batches of `spec`, of which only `rows` are here, as arrays on the devices."""
        whole = batches[0] if self._stacked == 1 else {n: np.stack([batch[n] for batch in batches]) for n in spec}
        if self._sharding is None:
            with jax.default_device(self._device) if self._device is not None else contextlib.nullcontext():
                return jax.device_put(whole)
        shardings = {name: self._of(len(leaf.shape), self._stacked) for name, leaf in spec.items()}
        if isinstance(rows, slice):
            return jax.device_put(whole, shardings)
        lead = () if self._stacked == 1 else (self._stacked,)

        def shard(local: np.ndarray, index: Any) -> np.ndarray:
            first, last, _ = index[len(lead)].indices(next(iter(spec.values())).shape[0])
            here = slice(*np.searchsorted(rows, (first, last)))
            return local[(*index[: len(lead)], here, *index[len(lead) + 1 :])]

        return {
            name: jax.make_array_from_callback(
                (*lead, *leaf.shape), shardings[name], lambda index, local=whole[name]: shard(local, index)
            )
            for name, leaf in spec.items()
        }

    def _of(self, rank: int, stacked: int) -> Sharding:
        """The sharding of an array that has `rank` axes in a batch of its own."""
        if not isinstance(self._sharding, NamedSharding):
            assert self._sharding is not None
            return self._sharding
        axes = tuple(self._sharding.spec)[:rank]
        spec = PartitionSpec(*axes) if stacked == 1 else PartitionSpec(None, *axes)
        return NamedSharding(self._sharding.mesh, spec, memory_kind=self._sharding.memory_kind)


def check_sharding(given: Any, batch: int, what: str) -> Sharding | None:
    """`given` as a sharding that cuts `batch` rows evenly, or an error in words."""
    if given is None or isinstance(given, jax.Device):
        return given and SingleDeviceSharding(given)
    if isinstance(given, Plan):
        raise TypeError(f"{what}: sharding is a place.Plan, which is more than where batches go; pass plan.batches.")
    if not isinstance(given, Sharding):
        raise TypeError(
            f"{what}: sharding is a {type(given).__name__} but is to be a jax.sharding.Sharding; "
            'write NamedSharding(mesh, PartitionSpec("data")).'
        )
    axes = tuple(given.spec)[:1] if isinstance(given, NamedSharding) else ()
    rows = NamedSharding(given.mesh, PartitionSpec(*axes)) if isinstance(given, NamedSharding) else given
    devices = len(rows.device_set)
    pieces = devices // rows.shard_shape((devices,))[0]
    below = batch - batch % pieces
    if below != batch:
        raise ValueError(
            f"{what}: a batch of {batch} does not divide evenly over the {pieces} parts that {given} cuts it into; "
            f"use batch={f'{below} or ' if below else ''}{below + pieces}."
        )
    return given
