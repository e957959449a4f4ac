"""Dropout of elements or of slices along some axes, and alpha dropout."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mlax._jax import explicit_sharding

# SELU tends to -SELU_FLOOR for x to minus infinity: its alpha times its scale
SELU_FLOOR = 1.6732632423543772848170429916717 * 1.0507009873554804934193349852946


def dropout(
    x: Float[Array, "..."],
    rng: jax.Array,
    rate: float | tuple[float, ...],
    *,
    axes: tuple[int, ...] | None = None,
    index: Int[Array, ""] | None = None,
) -> Float[Array, "..."]:
    """Dropout: set each element to 0 with probability `rate`, and divide the others by `1 - rate`.

    Given `axes`, elements that differ only along other axes are kept or dropped together; None: each independently.
    Of several rates, all below 1, `index` says which; it may be traced.
    """
    if isinstance(rate, tuple):
        if index is None:
            raise ValueError(f"dropout: there are {len(rate)} rates; pass index=, an integer array (), to choose one.")
        factors = jnp.asarray([1.0 / (1.0 - each) for each in rate], x.dtype)
        threshold = _choose(jnp.asarray(np.array([_threshold(each) for each in rate])), index)
        return lax.select(_keep_mask(x, rng, threshold, axes), x * _choose(factors, index), jnp.zeros_like(x))
    if rate == 0.0:
        return x
    if rate == 1.0:
        return jnp.zeros_like(x)
    return lax.select(_keep_mask(x, rng, _threshold(rate), axes), x / (1.0 - rate), jnp.zeros_like(x))


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
    return lax.select(
        _keep_mask(x, rng, _threshold(rate)), x * scale + shift, jnp.full_like(x, shift - scale * SELU_FLOOR)
    )


def _choose(table: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(table, index, keepdims=False)


def _threshold(rate: float) -> np.uint32:
    """Below which random bits are dropped: integers are compared, so that no float of another dtype occurs."""
    return np.uint32(min(round(rate * 2**32), 2**32 - 1))


def _keep_mask(x: Array, rng: jax.Array, threshold: Any, axes: tuple[int, ...] | None = None) -> Bool[Array, "..."]:
    """Which elements of `x` are kept; one draw for all that have the same indices along `axes`."""
    drawn = range(x.ndim) if axes is None else [axis % x.ndim for axis in axes]
    shape = tuple(size if axis in drawn else 1 for axis, size in enumerate(x.shape))
    bits = jax.random.bits(rng, shape, np.uint32, out_sharding=explicit_sharding(x, drawn))
    keep = bits >= threshold
    return jnp.broadcast_to(keep, x.shape, out_sharding=explicit_sharding(x))
