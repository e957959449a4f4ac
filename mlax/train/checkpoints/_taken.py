"""What a save takes from the devices: copies of all values, as they are at that moment."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from mlax.files import storable
from mlax.train.checkpoints._dtypes import NAMES
from mlax.train.checkpoints._processes import Group


class Piece(NamedTuple):
    """A block of an array, and where in the array it begins."""

    start: tuple[int, ...]
    array: np.ndarray


class Taken(NamedTuple):
    """One leaf: what it is, and the pieces of it that this process has to write."""

    shape: tuple[int, ...]
    dtype: str
    key: str | None  # the algorithm, if the leaf holds typed keys
    pieces: list[Piece]


def taken(leaves: Mapping[str, Any], group: Group) -> dict[str, Taken]:
    """Copies of the leaves: of each piece one, by the process whose device holds the first replica of it.

    All transfers are begun before the first is waited for. On a CPU the array of NumPy is the buffer itself, which
    the next step may be given to write over: hence a copy.
    """
    plain = {name: _data(name, leaf) for name, leaf in leaves.items()}
    shards = {name: _shards(leaf, group) for name, leaf in plain.items() if isinstance(leaf, jax.Array)}
    for pieces in shards.values():
        for _, data in pieces:
            data.copy_to_host_async()
    found: dict[str, Taken] = {}
    for name, leaf in plain.items():
        if isinstance(leaf, jax.Array):
            copied = _is_buffer(leaf)
            pieces = [Piece(start, _host(data, copied)) for start, data in shards[name]]
        else:
            pieces = [Piece((0,) * leaf.ndim, storable(leaf.copy()))] if group.index == 0 else []
        key = None if leaf is leaves[name] or not _is_key(leaves[name]) else str(jax.random.key_impl(leaves[name]))
        found[name] = Taken(leaf.shape, NAMES[leaf.dtype], key, pieces)
    return found


def _data(name: str, leaf: Any) -> jax.Array | np.ndarray:
    if isinstance(leaf, Tracer):
        raise TypeError(f"save: {name!r} is being traced; save outside of jit, after the step has returned.")
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise ValueError(f"save: the buffer of {name!r} was donated or deleted; save the state that came back.")
        return jax.random.key_data(leaf) if _is_key(leaf) else leaf
    if not isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        raise TypeError(f"save: {name!r} is a {type(leaf).__name__}, but leaves are arrays or numbers; try notes.")
    array = np.asarray(leaf)
    if array.dtype not in NAMES:
        raise TypeError(f"save: {name!r} has the dtype {array.dtype}, which is no number's; leave it out, or in notes.")
    return array


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf.dtype, np.dtype)  # JAX's own dtypes are those of keys


def _shards(leaf: jax.Array, group: Group) -> list[tuple[tuple[int, ...], jax.Array]]:
    if leaf.is_fully_addressable:
        if group.index > 0:
            return []  # an array of one process alone: the first process saves its own
        if leaf.is_fully_replicated:
            return [((0,) * leaf.ndim, leaf.addressable_data(0))]
    mine = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    return [(tuple(part.start or 0 for part in shard.index), shard.data) for shard in mine]


def _is_buffer(leaf: jax.Array) -> bool:
    """Whether NumPy sees the buffer itself: on a CPU, and in the memory of the host."""
    sharding = leaf.sharding
    return sharding.memory_kind not in (None, "device") or next(iter(sharding.device_set)).platform == "cpu"


def _host(data: jax.Array, copied: bool) -> np.ndarray:
    array = np.asarray(data)
    return storable(array.copy() if copied else array)
