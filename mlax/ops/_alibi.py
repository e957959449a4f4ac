"""ALiBi: scores that fall with the distance between query and key, at a rate of its own for each head."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer


def alibi_slopes(heads: int) -> np.ndarray:
    """The slope of each head, (heads,) float64: 2^(-8/n), 2^(-16/n), ... for n = heads a power of 2.

    Other numbers take the slopes of the power of 2 below, then every other one of the power above.
    https://arxiv.org/abs/2108.12409, section 3, and its authors' code for the latter.
    """
    below = 2 ** math.floor(math.log2(heads))
    slopes = 2.0 ** (-8 / below * np.arange(1, below + 1))
    between = 2.0 ** (-4 / below * np.arange(1, 2 * (heads - below), 2))
    return np.concatenate([slopes, between])


def alibi(
    heads: int, queries: Integer[Array, " t"], keys: Integer[Array, " s"], dtype: Any
) -> Float[Array, "1 {heads} t s"]:
    """The bias `-slope * |query position - key position|` to add to scores (b, h, t, s), in `dtype`.

    `attention(..., alibi=True)` adds the same without ever holding t x s numbers of it.
    """
    distance = jnp.abs(queries[:, None] - keys[None, :]).astype(dtype)
    slopes = jnp.asarray(alibi_slopes(heads).astype(dtype))
    return -slopes[None, :, None, None] * distance
