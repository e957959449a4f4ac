"""Clip: gradients kept within limits before an optimizer sees them."""

import jax
import jax.numpy as jnp

from mlax._jax import cast_scalar, tree_vdot
from mlax.core import frozen
from mlax.optim._base import ByPath
from mlax.optim._hyperparams import NonNegative
from mlax.optim._trees import norm
from mlax.optim._wrappers import OptimizerWrapper


@frozen
class ClipValue(OptimizerWrapper):
    """Each number of a gradient between -`limit` and `limit`."""

    elementwise = True
    limit: NonNegative = 1.0

    def advance(self, now, grads, weights, slots):
        limit = now.numbers(self)["limit"]
        clipped = {path: jnp.clip(g, -cast_scalar(limit, g), cast_scalar(limit, g)) for path, g in grads.items()}
        return self.optimizer.advance(now, clipped, weights, slots)


@frozen
class ClipNorm(OptimizerWrapper):
    """Each leaf of the gradient scaled down to the norm `limit`, if its own is larger."""

    limit: NonNegative = 1.0

    def advance(self, now, grads, weights, slots):
        limit = now.numbers(self)["limit"]
        clipped = {path: g * _shrink(norm(g), cast_scalar(limit, g)) for path, g in grads.items()}
        return self.optimizer.advance(now, clipped, weights, slots)


@frozen
class ClipGlobalNorm(OptimizerWrapper):
    """The whole gradient scaled down to the norm `limit`, if its own is larger.

    https://proceedings.mlr.press/v28/pascanu13.html
    """

    elementwise = True  # but for the norm, which `now.total` sees to
    limit: NonNegative = 1.0

    def advance(self, now, grads, weights, slots):
        size = jnp.sqrt(now.total(tree_vdot(grads, grads)))
        factor = _shrink(size, cast_scalar(now.numbers(self)["limit"], size))
        clipped = {path: g * factor.astype(g.dtype) for path, g in grads.items()}
        return self.optimizer.advance(now, clipped, weights, slots)


@frozen
class ClipAdaptive(OptimizerWrapper):
    """The gradient of each output scaled down to `limit` times the norm of its weights, that being at least `eps`.

    An output is a place on the last axis of a leaf of two axes, on the first of one of more, as kernels lie; a vector
    counts as a whole. Equation 3 of https://arxiv.org/abs/2102.06171
    """

    limit: NonNegative = 0.01
    eps: NonNegative = 1e-3

    def advance(self, now, grads, weights, slots):
        numbers = now.numbers(self)

        def clipped(g: jax.Array, w: jax.Array) -> jax.Array:
            most = cast_scalar(numbers["limit"], g) * jnp.maximum(_by_output(w), cast_scalar(numbers["eps"], g))
            return g * _shrink(_by_output(g), most)

        changed: ByPath = {path: clipped(g, weights[path]) for path, g in grads.items()}
        return self.optimizer.advance(now, changed, weights, slots)


def _shrink(size: jax.Array, limit: jax.Array) -> jax.Array:
    """The factor that brings `size` down to `limit`: at most 1, and 1 for a zero."""
    over = size > limit
    return jnp.where(over, limit / jnp.where(over, size, jnp.ones_like(size)), jnp.ones_like(size))


def _by_output(x: jax.Array) -> jax.Array:
    if x.ndim < 2:
        return norm(x)
    axes = (0,) if x.ndim == 2 else tuple(range(1, x.ndim))
    return jnp.sqrt(jnp.sum(x * x, axes, keepdims=True))
