"""Normalisation to mean 0 and variance 1."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlax.ops._checks import same_dtype
from mlax.ops._reduce import mean


def layer_norm(
    x: Float[Array, "..."],
    scale: Float[Array, "..."] | None = None,
    shift: Float[Array, "..."] | None = None,
    *,
    axes: tuple[int, ...] = (-1,),
    eps: float = 1e-5,
    accum_dtype: Any = None,
) -> Float[Array, "..."]:
    """`(x - mean) / sqrt(var + eps) * scale + shift` over `axes`, in the dtype of `x`.

    All of it runs in `accum_dtype` if one is given; the result is cast once, at the end.
    """
    same_dtype("layer_norm", x=x, scale=scale, shift=shift)
    dtype = x.dtype if accum_dtype is None else jnp.dtype(accum_dtype)
    wide = lax.convert_element_type(x, dtype)
    centred = wide - mean(wide, axes)
    y = centred * lax.rsqrt(mean(centred * centred, axes) + eps)
    if scale is not None:
        y = y * lax.convert_element_type(scale, dtype)
    if shift is not None:
        y = y + lax.convert_element_type(shift, dtype)
    return lax.convert_element_type(y, x.dtype)
