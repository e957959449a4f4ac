"""Dropout of elements or of slices along some axes, and alpha dropout."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from mlax._jax import explicit_sharding

# SELU tends to -SELU_FLOOR for x to minus infinity: its alpha times its scale
SELU_FLOOR = 1.6732632423543772848170429916717 * 1.0507009873554804934193349852946


def dropout(
    x: Float[Array, "..."], rng: jax.Array, rate: float, *, axes: tuple[int, ...] | None = None
) -> Float[Array, "..."]:
    """Dropout: set each element to 0 with probability `rate`, and divide the others by `1 - rate`.

    Given `axes`, elements that differ only along other axes are kept or dropped together; None: each independently.
    """
    if rate == 0.0:
        return x
    if rate == 1.0:
        return jnp.zeros_like(x)
    return lax.select(_keep_mask(x, rng, rate, axes), x / (1.0 - rate), jnp.zeros_like(x))


def alpha_dropout(x: Float[Array, "..."], rng: jax.Array, rate: float) -> Float[Array, "..."]:
    """Alpha dropout: set each element to the negative limit of SELU with probability `rate`, then scale and shift all
    of them.

    Elements of mean 0 and variance 1 keep both. https://arxiv.org/abs/1706.02515, section 3.
    """
    if rate == 0.0:
        return x
    if rate == 1.0:
        return jnp.zeros_like(x)
    scale = 1.0 / math.sqrt((1.0 - rate) * (1.0 + rate * SELU_FLOOR**2))
    shift = scale * rate * SELU_FLOOR
    return lax.select(_keep_mask(x, rng, rate), x * scale + shift, jnp.full_like(x, shift - scale * SELU_FLOOR))


def _keep_mask(x: Array, rng: jax.Array, rate: float, axes: tuple[int, ...] | None = None) -> Bool[Array, "..."]:
    """Which elements of `x` are kept; one draw for all that have the same indices along `axes`."""
    drawn = range(x.ndim) if axes is None else [axis % x.ndim for axis in axes]
    shape = tuple(size if axis in drawn else 1 for axis, size in enumerate(x.shape))
    # integers are compared, so that no float of another dtype occurs
    bits = jax.random.bits(rng, shape, np.uint32, out_sharding=explicit_sharding(x, drawn))
    keep = bits >= np.uint32(min(round(rate * 2**32), 2**32 - 1))
    return jnp.broadcast_to(keep, x.shape, out_sharding=explicit_sharding(x))
