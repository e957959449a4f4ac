"""Device memory and host memory: moving arrays between them, whole or in chunks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def is_on_host(leaf: Any) -> bool:
    """Whether an array lies in host memory."""
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def to_device(tree: Any) -> Any:
    """The arrays in the memory of the device that they belong to; those that are there already as they are."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if is_on_host(leaf) else leaf, tree)


def to_host(tree: Any) -> Any:
    """The arrays in host memory, if the devices know any."""
    if not _has_host_memory():
        return tree
    return jax.tree.map(lambda leaf: leaf if is_on_host(leaf) else jax.device_put(leaf, jax.memory.Space.Host), tree)


def to_memory_of(new: Any, old: Any) -> Any:
    """The arrays of `new`, each in the memory where its counterpart in `old` lies."""
    return jax.tree.map(lambda new, old: to_host(new) if is_on_host(old) else to_device(new), new, old)


def slice_to_device(stacks: Any, row: Any, rows: int = 1) -> Any:
    """On the device, `rows` rows of each stack from `row` on.

    `row` is never negative, and best a multiple of a loop's counter: XLA then copies on a GPU by the copy engine.
    """

    def one(stack: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(stack, row, rows, 0, allow_negative_indices=False)

    return to_device(jax.tree.map(one, stacks))


def write_slice(stacks: Any, pieces: Any, row: Any) -> Any:
    """The stacks with their rows from `row` on replaced, each in the memory where it lies."""

    def one(stack: jax.Array, piece: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(stack, to_memory_of(piece, stack), row, 0, allow_negative_indices=False)

    return jax.tree.map(one, stacks, pieces)


def _has_host_memory() -> bool:
    return any(memory.kind == "pinned_host" for memory in jax.local_devices()[0].addressable_memories())


MIN_CHUNK_BYTES = (
    2**22
)  # bytes that a piece should have at least, or starting its transfer would take longer than the transfer


def plan_chunks(leaves: Mapping[str, Iterable[Any]]) -> list[tuple[list[str], int]]:
    """Paths whose arrays are to go to the device together, and in how many pieces, of as many rows each.

    `leaves` gives all arrays of a path, of which the first has the rows that count. What is not worth the trouble is
    left out: paths with nothing in host memory, or with too few bytes to be cut.
    """
    rows: dict[int, dict[str, list[Any]]] = {}
    for path, arrays in leaves.items():
        arrays = list(arrays)
        alike = arrays[0].ndim and all(array.shape[:1] == arrays[0].shape[:1] for array in arrays)
        if alike and any(is_on_host(array) for array in arrays):
            rows.setdefault(len(arrays[0]), {})[path] = arrays
    found = []
    for count, group in rows.items():
        size = sum(array.size * array.dtype.itemsize for arrays in group.values() for array in arrays)
        numbers = [number for number in range(2, count + 1) if count % number == 0 and size >= number * MIN_CHUNK_BYTES]
        found += [(list(group), numbers[-1])] if numbers else []
    return found


def map_chunks_inplace(function: Callable[..., Any], written: Any, read: Any, number: int) -> Any:
    """The stacks `written`, each piece replaced by `function(row, its piece, the piece of read)`.

    In place, so that stacks which are donated are there once; a piece that comes back as it was is not written.
    Nothing is fetched ahead of its turn: what takes the time is the link to the host, and to read the next piece and
    write the last one meanwhile gave 64 instead of 60 GB/s on an H200, for three times the memory on the device.
    """
    rows = _rows(written, number)

    def step(time: Any, stacks: Any) -> Any:
        row = time * rows
        before = slice_to_device(stacks, row, rows)
        after = function(row, before, slice_to_device(read, row, rows))
        return jax.tree.map(
            lambda all, old, new: all if new is old else write_slice(all, new, row), stacks, before, after
        )

    return lax.fori_loop(0, number, step, written)


def sum_chunks(function: Callable[[Any], jax.Array], read: Any, number: int, start: jax.Array) -> jax.Array:
    """The sum of `function` over the pieces of the stacks, added to `start`."""
    rows = _rows(read, number)

    def step(time: Any, total: jax.Array) -> jax.Array:
        return total + function(slice_to_device(read, time * rows, rows)).astype(total.dtype)

    return lax.fori_loop(0, number, step, start)


def map_chunks(function: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    """`function` of each leaf, where the leaf lies; it must not care which rows it is given, nor how many."""

    def one(leaf: jax.Array) -> jax.Array:
        if not is_on_host(leaf):
            return function(leaf)
        number = next((number for _, number in plan_chunks({"": [leaf]})), None)
        if number is None:
            return to_host(function(to_device(leaf)))
        rows = len(leaf) // number
        pieces = lax.map(lambda time: to_host(function(slice_to_device(leaf, time * rows, rows))), jnp.arange(number))
        return pieces.reshape(len(leaf), *pieces.shape[2:])

    return jax.tree.map(one, tree)


def tree_add(sums: Any, news: Any) -> Any:
    """The sums, each where it lies and in its dtype, with the new leaves added."""

    def one(total: jax.Array, new: jax.Array) -> jax.Array:
        number = next((number for _, number in plan_chunks({"": [total, new]})), None)
        if number is None:
            return to_memory_of(to_device(total) + to_device(new).astype(total.dtype), total)
        return map_chunks_inplace(lambda _, total, new: total + new.astype(total.dtype), total, new, number)

    return jax.tree.map(one, sums, news)


def _rows(stacks: Any, number: int) -> int:
    return len(jax.tree.leaves(stacks)[0]) // number
