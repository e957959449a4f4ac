"""Variables of several copies of one layer, stacked on a leading axis."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from mlax.core._layer import Layer, Tree, variables_like


def init_stacked(layer: Layer, rng: jax.Array, x: Any, times: int) -> tuple[Tree, Tree]:
    """What `times` calls of `layer.init`, each with a key of its own, would give, stacked.

    Outside of a trace each copy is made on its own and written to its place, so that every compiled piece is
    shared with the layer alone, and memory holds the stack and one copy at most.
    """
    if isinstance(rng, Tracer):
        return jax.vmap(lambda time: layer.init(jax.random.fold_in(rng, time), x))(jnp.arange(times, dtype=np.uint32))
    stacked = _room(*variables_like(layer, x), times)
    for time in range(times):
        stacked = _written(stacked, layer.init(jax.random.fold_in(rng, np.uint32(time)), x), np.uint32(time))
    return stacked


def unstacked(tree: Any, times: int) -> list[Any]:
    """The slices along the leading axis; their gradient is one concatenation, where indexing's is a sum of n."""
    leaves, treedef = jax.tree.flatten(tree)
    columns = [[lax.squeeze(piece, (0,)) for piece in lax.split(leaf, (1,) * times)] for leaf in leaves]
    return [jax.tree.unflatten(treedef, row) for row in zip(*columns, strict=True)] or [tree] * times


def _room(trainables: Tree, non_trainables: Tree, times: int) -> tuple[Tree, Tree]:
    leaves, treedef = jax.tree.flatten((trainables, non_trainables))
    made = _zeros(tuple(((times, *leaf.shape), leaf.dtype) for leaf in leaves))
    return jax.tree.unflatten(treedef, made)


@functools.partial(jax.jit, static_argnums=0)
def _zeros(leaves: tuple[tuple[tuple[int, ...], Any], ...]) -> list[jax.Array]:
    return [jnp.zeros(shape, dtype) for shape, dtype in leaves]


@functools.partial(jax.jit, donate_argnums=0)
def _written(stacked: Any, copy: Any, time: int) -> Any:
    return jax.tree.map(lambda whole, one: lax.dynamic_update_index_in_dim(whole, one, time, 0), stacked, copy)
