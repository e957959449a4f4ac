"""The average of non_trainables, such as BatchNorm's statistics, that belongs to averaged weights."""

from typing import Any

import jax
import jax.numpy as jnp

from mlax._jax import at_least_float32
from mlax.core import Tree
from mlax.optim._trees import cast_like


def copy_floats(non_trainables: Tree) -> Tree:
    """A copy of the floating leaves in float32 or wider; None for the others, and None if there are no floats."""
    copied = jax.tree.map(
        lambda leaf: jnp.array(leaf, at_least_float32(leaf.dtype), copy=True) if _is_float(leaf) else None,
        non_trainables,
    )
    return copied if jax.tree.leaves(copied) else None


def move_average(average: Tree, non_trainables: Tree, weight: jax.Array) -> Tree:
    """The average, moved by the fraction `weight` towards the floating leaves of the non_trainables."""

    def move(new: jax.Array, old: jax.Array | None) -> jax.Array | None:
        if old is None:
            return None
        share = weight.astype(old.dtype)
        # the new value itself for a share of 1, whatever the old one is
        return jnp.where(share < 1, old + share * (new.astype(old.dtype) - old), new.astype(old.dtype))

    return None if average is None else jax.tree.map(move, non_trainables, average)


def fill_in_average(average: Tree, non_trainables: Tree) -> Any:
    """The non_trainables with the averaged leaves in place of their own, in the same dtypes."""
    if average is None:
        return non_trainables
    return jax.tree.map(lambda leaf, mean: leaf if mean is None else cast_like(mean, leaf), non_trainables, average)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
