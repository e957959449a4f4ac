"""Stacks: leaves whose leading axes count layers, each of which is updated like a separate leaf."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from mlax._jax import explicit_sharding
from mlax.core import STACKED, matches, stacked_axes
from mlax.optim._hyperparams import Patterns
from mlax.optim._slots import Slot
from mlax.optim._trees import UnknownShape


def count_stacked_axes(patterns: Patterns, path: str) -> int:
    """The leading axes of a leaf that count layers: those that its path names, or one if a pattern matches it."""
    named = stacked_axes(path)
    if not matches(patterns, path):
        return named
    if named:
        raise ValueError(
            f"stacked names {path!r}, whose path says already that it is a stack, by the name {STACKED!r}; leave the "
            f"pattern out, or, if an axis was added by hand, put the tree under one more name {STACKED!r}."
        )
    return 1


def layer_shape(w: Any, axes: int) -> Any:
    """The shape and dtype of one layer of a stack; a parameter of unknown shape is returned as it is."""
    return w if isinstance(w, UnknownShape) or not axes else jax.ShapeDtypeStruct(w.shape[axes:], w.dtype)


def stack_slot(slot: Slot, axes: int) -> Slot:
    """The slot of a stack of layers, from that of one layer."""
    if slot.axes is ...:
        return slot
    return slot._replace(axes=(*range(axes), *(None if axis is None else axis + axes for axis in slot.axes)))


def map_layers_of(function: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """The function of one layer as one of stacks, whose first `axes` axes count layers."""
    for _ in range(axes):
        function = jax.vmap(function)
    return function


def broadcast_over_layers(factor: Any, like: jax.Array, axes: int) -> Any:
    """A number, or an array that broadcasts against `like`, as an array with its leading `axes`, sharded like them."""
    factor = jnp.asarray(factor)
    factor = factor.reshape(*[1] * (axes - factor.ndim), *factor.shape)
    factor = jnp.broadcast_to(factor, (*like.shape[:axes], *factor.shape[axes:]))
    sharding = explicit_sharding(like, range(axes))
    if sharding is None:
        return factor
    return jax.sharding.reshard(factor, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:axes])))
