"""The two memories of a device: its own, and that of its host, where large variables can wait for their turn."""

from typing import Any

import jax
from jax import lax


def in_host(leaf: Any) -> bool:
    """Whether an array lies in host memory."""
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def to_device(tree: Any) -> Any:
    """The arrays in the memory of the device that they belong to; those that are there already as they are."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if in_host(leaf) else leaf, tree)


def to_host(tree: Any) -> Any:
    """The arrays in host memory, if the devices know any."""
    if not _known():
        return tree
    return jax.tree.map(lambda leaf: leaf if in_host(leaf) else jax.device_put(leaf, jax.memory.Space.Host), tree)


def beside(new: Any, old: Any) -> Any:
    """The arrays of `new`, each in the memory where its counterpart in `old` lies."""
    return jax.tree.map(lambda new, old: to_host(new) if in_host(old) else to_device(new), new, old)


def fetched(stacks: Any, row: Any, rows: int = 1) -> Any:
    """On the device, `rows` rows of each stack from `row` on.

    `row` is never negative, and best a multiple of a loop's counter: XLA then copies on a GPU by the copy engine.
    """

    def one(stack: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(stack, row, rows, 0, allow_negative_indices=False)

    return to_device(jax.tree.map(one, stacks))


def stored(stacks: Any, pieces: Any, row: Any) -> Any:
    """The stacks with their rows from `row` on replaced, each in the memory where it lies."""

    def one(stack: jax.Array, piece: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(stack, beside(piece, stack), row, 0, allow_negative_indices=False)

    return jax.tree.map(one, stacks, pieces)


def _known() -> bool:
    return any(memory.kind == "pinned_host" for memory in jax.local_devices()[0].addressable_memories())
