"""Normalisation to mean 0 and variance 1."""

from typing import Any

from jax import lax
from jaxtyping import Array, Float

from mlax.ops._affine import affine
from mlax.ops._checks import same_dtype
from mlax.ops._reduce import mean
from mlax.ops._rms_norm import over_rms


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
    wide = lax.convert_element_type(x, x.dtype if accum_dtype is None else accum_dtype)
    y = over_rms(wide - mean(wide, axes), axes, eps)
    return lax.convert_element_type(affine(y, scale, shift), x.dtype)
