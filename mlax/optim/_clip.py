"""Gradient clipping: ClipValue, ClipNorm, ClipGlobalNorm and ClipAdaptive."""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mlax._jax import cast_scalar, euclidean_norm, is_narrow, tree_vdot
from mlax.core import frozen
from mlax.optim._hyperparams import NonNegative, Patterns
from mlax.optim._stacks import count_stacked_axes, map_layers_of
from mlax.optim._trees import norm
from mlax.optim._wrappers import OptimizerWrapper


@frozen
class ClipValue(OptimizerWrapper):
    """Gradient clipping by value: clip each element of a gradient to between `-limit` and `limit`.

    >>> optimizer = optim.ClipValue(optim.SGD(0.1), limit=0.5)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step',)
    """

    elementwise = True
    keeps_bounds = True
    limit: NonNegative = 1.0  # of the absolute value of each element

    def update_leaves(self, context, grads, weights, slots):
        limit = context.hyperparams(self)["limit"]
        clipped = {path: jnp.clip(g, -cast_scalar(limit, g), cast_scalar(limit, g)) for path, g in grads.items()}
        return self.optimizer.update_leaves(context, clipped, weights, slots)


@frozen
class LeafClip(OptimizerWrapper):
    """A wrapper that clips each leaf of the gradient, or each layer of a stack: write `clip`.

    Paths say which leaves of `Repeat` and of experts are stacks (`mlax.stacked_axes`); the patterns `stacked` name
    those that were stacked by hand.
    """

    stacked: Patterns = dataclasses.field(default=(), kw_only=True)  # patterns of leaves that were stacked by hand

    @abc.abstractmethod
    def clip(self, values: Mapping[str, Any], g: jax.Array, w: jax.Array) -> jax.Array:
        """The clipped gradient of one leaf with the weights `w`, given the hyperparameters at this step."""

    def patterns(self):
        return (*self.stacked, *self.optimizer.patterns())

    def is_chunkable(self, path):
        return count_stacked_axes(self.stacked, path) > 0 and self.optimizer.is_chunkable(path)

    def update_leaves(self, context, grads, weights, slots):
        clip = functools.partial(self.clip, context.hyperparams(self))
        clipped = {
            path: map_layers_of(clip, count_stacked_axes(self.stacked, path))(g, weights[path]) if g.size else g
            for path, g in grads.items()
        }
        return self.optimizer.update_leaves(context, clipped, weights, slots)


@frozen
class ClipNorm(LeafClip):
    """Gradient clipping by norm: scale each leaf of the gradient, or each layer of a stack, down to the norm `limit`,
    if its norm is larger.

    >>> optimizer = optim.ClipNorm(optim.SGD(0.1), limit=1.0)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step',)
    """

    limit: NonNegative = 1.0  # of the norm of each leaf's gradient

    def clip(self, values, g, w):
        return g * _clip_factor(norm(g), cast_scalar(values["limit"], g))


@frozen
class ClipGlobalNorm(OptimizerWrapper):
    """Gradient clipping by global norm: scale the whole gradient down to the norm `limit`, if its norm is larger.

    Algorithm 1 of https://proceedings.mlr.press/v28/pascanu13.html

    >>> optimizer = optim.ClipGlobalNorm(optim.AdamW(3e-4), limit=1.0)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'square')
    """

    elementwise = True  # except for the norm, which goes through `context.global_sum`
    keeps_bounds = True
    limit: NonNegative = 1.0  # of the norm of all gradients together

    def update_leaves(self, context, grads, weights, slots):
        size = jnp.sqrt(context.global_sum(tree_vdot(grads, grads)))
        factor = _clip_factor(size, cast_scalar(context.hyperparams(self)["limit"], size))
        clipped = {path: g * factor.astype(g.dtype) for path, g in grads.items()}
        return self.optimizer.update_leaves(context, clipped, weights, slots)


@frozen
class ClipAdaptive(LeafClip):
    """Adaptive gradient clipping (AGC): scale the gradient of each output unit down to `limit` times the norm of its
    weights, which is at least `eps`.

    Units are on the last axis of a leaf of two axes, and on the first axis of one of more; a vector is one unit. The
    layers of a stack are separate leaves. Equation 3 of https://arxiv.org/abs/2102.06171

    >>> optimizer = optim.ClipAdaptive(optim.SGD(0.1), limit=0.01)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step',)
    """

    limit: NonNegative = 0.01  # of the norm of a gradient over that of its weights
    eps: NonNegative = 1e-3  # the least norm of weights

    def clip(self, values, g, w):
        limit = cast_scalar(values["limit"], g) * jnp.maximum(_unit_norms(w), cast_scalar(values["eps"], g))
        return g * _clip_factor(_unit_norms(g), limit)


def _clip_factor(size: jax.Array, limit: jax.Array) -> jax.Array:
    """The factor that scales `size` down to `limit`: at most 1, and 1 for zero."""
    over = size > limit
    return jnp.where(over, limit / jnp.where(over, size, jnp.ones_like(size)), jnp.ones_like(size))


def _unit_norms(x: jax.Array) -> jax.Array:
    if x.ndim < 2:
        return norm(x)
    axes = (0,) if x.ndim == 2 else tuple(range(1, x.ndim))
    return euclidean_norm(x, axes) if is_narrow(x.dtype) else jnp.sqrt(jnp.sum(x * x, axes, keepdims=True))
