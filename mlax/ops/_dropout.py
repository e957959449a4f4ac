"""Dropout of elements."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float


def dropout(x: Float[Array, "..."], rng: jax.Array, rate: float) -> Float[Array, "..."]:
    """Set each element to 0 with the probability `rate`, and divide the others by `1 - rate`."""
    if rate == 0.0:
        return x
    if rate == 1.0:
        return jnp.zeros_like(x)
    bits = jax.random.bits(rng, x.shape, np.uint32)  # whole numbers: no float of another dtype is made
    kept = bits >= np.uint32(min(round(rate * 2**32), 2**32 - 1))
    return lax.select(kept, x / (1.0 - rate), jnp.zeros_like(x))
