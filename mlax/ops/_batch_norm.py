"""Normalisation of each channel by the statistics of a batch, or by given ones."""

import math
from typing import Any

from jax import lax
from jaxtyping import Array, Float

from mlax.ops._affine import affine
from mlax.ops._checks import same_dtype
from mlax.ops._reduce import mean


def batch_norm(
    x: Float[Array, "..."],
    centre: Float[Array, " c"],
    var: Float[Array, " c"],
    scale: Float[Array, " c"] | None = None,
    shift: Float[Array, " c"] | None = None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
) -> Float[Array, "..."]:
    """`(x - centre) / sqrt(var + eps) * scale + shift` for each channel along `axis`, in the dtype of `x`.

    All of it runs in the dtype of the statistics; the result is cast once, at the end.
    """
    same_dtype("batch_norm", x=x, scale=scale, shift=shift)
    same_dtype("batch_norm", centre=centre, var=var)

    def along(each: Any) -> Any:
        return None if each is None else lax.expand_dims(each, _others(x, axis))

    wide = lax.convert_element_type(x, centre.dtype)
    y = (wide - along(centre)) * lax.rsqrt(along(var) + eps)
    return lax.convert_element_type(affine(y, along(scale), along(shift)), x.dtype)


def batch_statistics(
    x: Float[Array, "..."], *, axis: int = -1, axis_name: Any = None, accum_dtype: Any = None
) -> tuple[Float[Array, " c"], Float[Array, " c"], int]:
    """The mean and the variance (of the centred values, by their count) over all axes but `axis`, and the count.

    Both are in the dtype of `x`, or in `accum_dtype`, and over all devices along `axis_name` if there is one.
    """
    wide = lax.convert_element_type(x, x.dtype if accum_dtype is None else accum_dtype)
    others = _others(x, axis)
    count = math.prod(x.shape[each] for each in others)

    def over_all(x: Any) -> Any:
        own = mean(x, others)
        return own if axis_name is None else lax.pmean(own, axis_name)

    centre = over_all(wide)
    centred = wide - centre
    var = over_all(centred * centred)
    total = count if axis_name is None else count * lax.axis_size(axis_name)
    return lax.squeeze(centre, others), lax.squeeze(var, others), total


def _others(x: Any, axis: int) -> tuple[int, ...]:
    return tuple(each for each in range(x.ndim) if each != axis % x.ndim)
