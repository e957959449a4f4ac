"""Variables of several copies of one layer, stacked on a leading axis."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from mlax.core._layer import Layer, Tree, variables_like
from mlax.core._memory import stored, to_host


def init_stacked(layer: Layer, rng: jax.Array, x: Any, times: int, *, in_host: bool = False) -> tuple[Tree, Tree]:
    """What `times` calls of `layer.init`, each with a key of its own, would give, stacked.

    Outside of a trace each copy is made on its own and written to its place, so that every compiled piece is
    shared with the layer alone, and memory holds the stack and one copy at most. With `in_host` the stack of the
    trainables is in host memory, inside of a trace too, and the device holds one copy at most.
    """
    if isinstance(rng, Tracer):
        of = functools.partial(_copy, layer, x, rng)
        keys = jnp.arange(times, dtype=np.uint32)
        return lax.map(lambda time: _kept(of(time), in_host), keys) if in_host else jax.vmap(of)(keys)
    stacked = _room(*variables_like(layer, x), times, in_host)
    for time in range(times):
        stacked = _written(stacked, _copy(layer, x, rng, np.uint32(time)), np.uint32(time))
    return stacked


def unstacked(tree: Any, times: int) -> list[Any]:
    """The slices along the leading axis; their gradient is one concatenation, where indexing's is a sum of n."""
    leaves, treedef = jax.tree.flatten(tree)
    columns = [[lax.squeeze(piece, (0,)) for piece in lax.split(leaf, (1,) * times)] for leaf in leaves]
    return [jax.tree.unflatten(treedef, row) for row in zip(*columns, strict=True)] or [tree] * times


def _copy(layer: Layer, x: Any, rng: jax.Array, time: Any) -> tuple[Tree, Tree]:
    return layer.init(jax.random.fold_in(rng, time), x)


def _kept(variables: tuple[Tree, Tree], in_host: bool) -> tuple[Tree, Tree]:
    trainables, non_trainables = variables
    return to_host(trainables) if in_host else trainables, non_trainables


def _room(trainables: Tree, non_trainables: Tree, times: int, in_host: bool) -> tuple[Tree, Tree]:
    leaves, treedef = jax.tree.flatten((trainables, non_trainables))
    return _zeros(treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves), times, in_host)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _zeros(treedef: Any, leaves: tuple[tuple[tuple[int, ...], Any], ...], times: int, in_host: bool) -> Any:
    def one(times: tuple[int, ...]) -> Any:
        return treedef.unflatten([jnp.zeros((*times, *shape), dtype) for shape, dtype in leaves])

    # a row at a time, since XLA would make all of it on the device first
    return lax.map(lambda _: _kept(one(()), True), jnp.arange(times)) if in_host else one((times,))


@functools.partial(jax.jit, donate_argnums=0)
def _written(stacked: Any, copy: Any, time: int) -> Any:
    return stored(stacked, jax.tree.map(lambda leaf: leaf[None], copy), time)
