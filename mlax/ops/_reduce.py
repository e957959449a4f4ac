"""Sums and means that stay in one dtype."""

import math

from jax import lax
from jaxtyping import Array, Float


def mean(x: Float[Array, "..."], axes: tuple[int, ...]) -> Float[Array, "..."]:
    """The mean over `axes`, which stay as axes of size 1, added up in the dtype of `x`.

    (`jnp.mean` adds float16 and bfloat16 in float32, unasked.)
    """
    axes = tuple(axis % x.ndim for axis in axes)
    total = lax.reduce_sum(x, axes)
    return lax.expand_dims(total, axes) / math.prod(x.shape[axis] for axis in axes)
