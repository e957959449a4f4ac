"""The average of running statistics, such as BatchNorm's, that belongs to averaged weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mlax._jax import at_least_float32, leaves_with_paths
from mlax.core import Tree
from mlax.optim._trees import cast_like

STATISTICS = ("mean", "var")  # an average of singular vectors, counts or caches would mean nothing

WeightOf = Callable[[str], jax.Array | None]  # of the new value at a path in its average; None: it is not averaged


def init_average(non_trainables: Tree, weight_of: WeightOf) -> Tree:
    """A copy of the statistics to average, in float32 or wider; None for other leaves, and None if there are none."""

    def copy(path: str, leaf: jax.Array) -> jax.Array | None:
        if not _is_statistic(path, leaf) or weight_of(path) is None:
            return None
        return jnp.array(leaf, at_least_float32(leaf.dtype), copy=True)

    copied = [copy(path, leaf) for path, leaf in leaves_with_paths(non_trainables)]
    return None if all(leaf is None for leaf in copied) else jax.tree.structure(non_trainables).unflatten(copied)


def move_average(average: Tree, non_trainables: Tree, weight_of: WeightOf) -> Tree:
    """The average, each leaf of it moved towards the new statistic by the fraction that is its weight."""
    if average is None:
        return None
    old = dict(leaves_with_paths(average))

    def move(path: str, new: jax.Array) -> jax.Array | None:
        weight = weight_of(path) if path in old else None
        if weight is None:
            return old.get(path)
        share, before, after = weight.astype(old[path].dtype), old[path], new.astype(old[path].dtype)
        # the new value itself for a share of 1, whatever the old one is
        return jnp.where(share < 1, before + share * (after - before), after)

    moved = [move(path, leaf) for path, leaf in leaves_with_paths(non_trainables)]
    return jax.tree.structure(non_trainables).unflatten(moved)


def fill_in_average(average: Tree, non_trainables: Tree) -> Any:
    """The non_trainables with the averaged leaves in place of their own, in the same dtypes."""
    if average is None:
        return non_trainables
    return jax.tree.map(lambda leaf, mean: leaf if mean is None else cast_like(mean, leaf), non_trainables, average)


def _is_statistic(path: str, leaf: Any) -> bool:
    return path.rpartition("/")[2] in STATISTICS and jnp.issubdtype(leaf.dtype, jnp.floating)
