"""Device memory and host memory: moving arrays between them, whole or in chunks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer


def is_on_host(leaf: Any) -> bool:
    """Whether an array is in host memory."""
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def are_on_one_device(tree: Any) -> bool:
    """Whether all leaves are arrays in the memory of one device, all committed to it or none."""
    leaves = jax.tree.leaves(tree)
    if not all(isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) for leaf in leaves):
        return False
    placements = {(*leaf.devices(), leaf.committed) for leaf in leaves}
    return len(placements) == 1 and len(next(iter(placements))) == 2 and not any(map(is_on_host, leaves))


def to_device(tree: Any) -> Any:
    """Copy the arrays that are in host memory to their device."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if is_on_host(leaf) else leaf, tree)


def to_host(tree: Any) -> Any:
    """Copy the arrays to host memory, if the devices have one."""
    if not _has_host_memory():
        return tree
    return jax.tree.map(lambda leaf: leaf if is_on_host(leaf) else jax.device_put(leaf, jax.memory.Space.Host), tree)


def to_memory_of(new: Any, old: Any) -> Any:
    """Copy each array of `new` to the memory of its counterpart in `old`."""
    return jax.tree.map(lambda new, old: to_host(new) if is_on_host(old) else to_device(new), new, old)


def slice_to_device(stacks: Any, row: Any, rows: int = 1) -> Any:
    """Copy `rows` rows of each stack, from `row` on, to the device.

    `row` is not negative, and best a multiple of a loop counter: XLA then uses the copy engine of a GPU.
    """

    def one(stack: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(stack, row, rows, 0, allow_negative_indices=False)

    return to_device(jax.tree.map(one, stacks))


def write_slice(stacks: Any, pieces: Any, row: Any) -> Any:
    """Write `pieces` over the rows of the stacks from `row` on, in the memory of each stack."""

    def one(stack: jax.Array, piece: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(stack, to_memory_of(piece, stack), row, 0, allow_negative_indices=False)

    return jax.tree.map(one, stacks, pieces)


def _has_host_memory() -> bool:
    return any(memory.kind == "pinned_host" for memory in jax.local_devices()[0].addressable_memories())


MIN_CHUNK_BYTES = 2**22  # below it, starting a transfer takes longer than the transfer


def plan_chunks(leaves: Mapping[str, Iterable[Any]]) -> list[tuple[list[str], int]]:
    """Groups of paths to transfer together, each with the number of chunks, of equally many rows.

    `leaves` holds all arrays of a path, whose rows must agree. Paths with nothing in host memory, or with too few
    bytes to split, are left out.
    """
    by_rows: dict[int, dict[str, list[Any]]] = {}
    for path, arrays in leaves.items():
        arrays = list(arrays)
        same_rows = arrays[0].ndim and all(array.shape[:1] == arrays[0].shape[:1] for array in arrays)
        if same_rows and any(is_on_host(array) for array in arrays):
            by_rows.setdefault(len(arrays[0]), {})[path] = arrays
    groups = []
    for count, group in by_rows.items():
        size = sum(array.size * array.dtype.itemsize for arrays in group.values() for array in arrays)
        numbers = [number for number in range(2, count + 1) if count % number == 0 and size >= number * MIN_CHUNK_BYTES]
        groups += [(list(group), numbers[-1])] if numbers else []
    return groups


def map_chunks_inplace(function: Callable[..., Any], written: Any, read: Any, number: int) -> Any:
    """Replace each chunk of the stacks `written` by `function(row, its chunk, the chunk of read)`.

    It works in place, so that donated stacks exist once; a chunk that is returned unchanged is not written. Nothing
    is prefetched: the link to the host is the bottleneck, and overlapping reads with writes gave 64 instead of
    60 GB/s on an H200, for three times the device memory.
    """
    rows = _rows(written, number)

    def step(index: Any, stacks: Any) -> Any:
        row = index * rows
        before = slice_to_device(stacks, row, rows)
        after = function(row, before, slice_to_device(read, row, rows))
        return jax.tree.map(
            lambda all, old, new: all if new is old else write_slice(all, new, row), stacks, before, after
        )

    return lax.fori_loop(0, number, step, written)


def sum_chunks(function: Callable[[Any], jax.Array], read: Any, number: int, start: jax.Array) -> jax.Array:
    """`start` plus the sum of `function` over the chunks of the stacks."""
    rows = _rows(read, number)

    def step(index: Any, total: jax.Array) -> jax.Array:
        return total + function(slice_to_device(read, index * rows, rows)).astype(total.dtype)

    return lax.fori_loop(0, number, step, start)


def map_chunks(function: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    """Apply `function` to each leaf in the memory of the leaf, in chunks; it must act on each row independently."""

    def one(leaf: jax.Array) -> jax.Array:
        if not is_on_host(leaf):
            return function(leaf)
        number = next((number for _, number in plan_chunks({"": [leaf]})), None)
        if number is None:
            return to_host(function(to_device(leaf)))
        rows = len(leaf) // number
        pieces = lax.map(lambda index: to_host(function(slice_to_device(leaf, index * rows, rows))), jnp.arange(number))
        return pieces.reshape(len(leaf), *pieces.shape[2:])

    return jax.tree.map(one, tree)


def tree_add(sums: Any, news: Any) -> Any:
    """Add the leaves of `news` to `sums`, each in the memory and dtype of its sum."""

    def one(total: jax.Array, new: jax.Array) -> jax.Array:
        number = next((number for _, number in plan_chunks({"": [total, new]})), None)
        if number is None:
            return to_memory_of(to_device(total) + to_device(new).astype(total.dtype), total)
        return map_chunks_inplace(lambda _, total, new: total + new.astype(total.dtype), total, new, number)

    return jax.tree.map(one, sums, news)


def _rows(stacks: Any, number: int) -> int:
    return len(jax.tree.leaves(stacks)[0]) // number
