"""Sums, means and norms that stay in one dtype."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def mean(x: Float[Array, "..."], axes: tuple[int, ...]) -> Float[Array, "..."]:
    """The mean over `axes`, which stay as axes of size 1, added up in the dtype of `x`.

    (`jnp.mean` adds float16 and bfloat16 in float32, unasked.)
    """
    axes = tuple(axis % x.ndim for axis in axes)
    count = math.prod(x.shape[axis] for axis in axes)
    # float16 ends at 65504: divide by about the square root of the count before the sum, and by the rest after it
    before = 2.0 ** min(count.bit_length() // 2, 15) if x.dtype == jnp.float16 else 1.0
    total = lax.reduce_sum(x / before if before > 1 else x, axes)
    return lax.expand_dims(total, axes) / (count / before)


def norm(x: Float[Array, "..."], axes: tuple[int, ...]) -> Float[Array, "..."]:
    """The Euclidean norm over `axes`, which stay as axes of size 1; no square over- or underflows."""
    axes = tuple(axis % x.ndim for axis in axes)
    largest = lax.stop_gradient(lax.expand_dims(lax.reduce_max(lax.abs(x), axes), axes))
    largest = jnp.where(largest > 0, largest, jnp.ones_like(largest))
    scaled = x / largest
    return largest * lax.sqrt(lax.expand_dims(lax.reduce_sum(scaled * scaled, axes), axes))
