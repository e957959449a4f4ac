"""Dropout that keeps mean 0 and variance 1."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlax.ops._dropout import kept

# where SELU ends for x to minus infinity is -FLOOR: its alpha times its scale
FLOOR = 1.6732632423543772848170429916717 * 1.0507009873554804934193349852946


def alpha_dropout(x: Float[Array, "..."], rng: jax.Array, rate: float) -> Float[Array, "..."]:
    """Set each element to the floor of SELU with the probability `rate`, then scale and shift all of them.

    Elements of mean 0 and variance 1 keep both. https://arxiv.org/abs/1706.02515, section 3.
    """
    if rate == 0.0:
        return x
    if rate == 1.0:
        return jnp.zeros_like(x)
    scale = 1.0 / math.sqrt((1.0 - rate) * (1.0 + rate * FLOOR**2))
    shift = scale * rate * FLOOR
    return lax.select(kept(x, rng, rate), x * scale + shift, jnp.full_like(x, shift - scale * FLOOR))
