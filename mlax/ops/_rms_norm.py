"""Normalisation to mean square 1."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlax.ops._affine import affine
from mlax.ops._checks import same_dtype
from mlax.ops._reduce import mean


def rms_norm(
    x: Float[Array, "..."],
    scale: Float[Array, "..."] | None = None,
    *,
    axes: tuple[int, ...] = (-1,),
    eps: float = 1e-6,
    accum_dtype: Any = None,
) -> Float[Array, "..."]:
    """`x / sqrt(mean(x * x) + eps) * scale` over `axes`, in the dtype of `x`.

    All of it runs in `accum_dtype` if one is given; the result is cast once, at the end.
    """
    same_dtype("rms_norm", x=x, scale=scale)
    wide = lax.convert_element_type(x, x.dtype if accum_dtype is None else accum_dtype)
    return lax.convert_element_type(affine(over_rms(wide, axes, eps)[0], scale, None), x.dtype)


def over_rms(x: Float[Array, "..."], axes: tuple[int, ...], eps: float) -> tuple[Float[Array, "..."], Any]:
    """`x / sqrt(mean(x * x) + eps)` over `axes`, and the factor of x; in float16 no square over- or underflows."""
    if x.dtype != jnp.float16:
        factor = lax.rsqrt(mean(x * x, axes) + eps)
        return x * factor, factor
    # the result is the same for x / size and sqrt(eps) / size, which are both at most 1
    axes = tuple(axis % x.ndim for axis in axes)
    size = lax.expand_dims(lax.reduce_max(lax.abs(x), axes), axes)
    size = lax.stop_gradient(lax.max(size, lax.full_like(size, math.sqrt(eps))))
    x, root = x / size, math.sqrt(eps) / size
    factor = lax.rsqrt(mean(x * x, axes) + root * root)
    return x * factor, factor / size
