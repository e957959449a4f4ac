"""Batch, layer, RMS and group normalisation."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlax.ops._checks import check_same_dtype


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
    check_same_dtype("batch_norm", x=x, scale=scale, shift=shift)
    check_same_dtype("batch_norm", centre=centre, var=var)

    def along(each: Any) -> Any:
        return None if each is None else lax.expand_dims(each, _other_axes(x, axis))

    wide = lax.convert_element_type(x, centre.dtype)
    y = (wide - along(centre)) * lax.rsqrt(along(var) + eps)
    return lax.convert_element_type(scale_and_shift(y, along(scale), along(shift)), x.dtype)


def batch_statistics(
    x: Float[Array, "..."], *, axis: int = -1, axis_name: Any = None, accum_dtype: Any = None
) -> tuple[Float[Array, " c"], Float[Array, " c"], int]:
    """The mean and the variance (of the centred values, by their count) over all axes but `axis`, and the count.

    Both are in the dtype of `x`, or in `accum_dtype`, and over all devices along `axis_name` if there is one.
    """
    wide = lax.convert_element_type(x, x.dtype if accum_dtype is None else accum_dtype)
    others = _other_axes(x, axis)
    count = math.prod(x.shape[each] for each in others)

    def over_all(x: Any) -> Any:
        own = mean(x, others)
        return own if axis_name is None else lax.pmean(own, axis_name)

    centre = over_all(wide)
    centred = wide - centre
    var = over_all(centred * centred)
    total = count if axis_name is None else count * lax.axis_size(axis_name)
    return lax.squeeze(centre, others), lax.squeeze(var, others), total


def _other_axes(x: Any, axis: int) -> tuple[int, ...]:
    return tuple(each for each in range(x.ndim) if each != axis % x.ndim)


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
    check_same_dtype("layer_norm", x=x, scale=scale, shift=shift)
    wide = lax.convert_element_type(x, x.dtype if accum_dtype is None else accum_dtype)
    return lax.convert_element_type(scale_and_shift(_standardize(wide, axes, eps), scale, shift), x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _standardize(x: Array, axes: tuple[int, ...], eps: float) -> Array:
    """`(x - mean) / sqrt(var + eps)`."""
    return divide_by_rms(x - mean(x, axes), axes, eps)[0]


@_standardize.defjvp
def _(axes: tuple[int, ...], eps: float, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """What the chain rule gives once its terms are gathered; as they come, a training step takes twice as long."""
    (x,), (dx,) = primals, tangents
    y, slope = divide_by_rms(x - mean(x, axes), axes, eps)
    return y, slope * (dx - mean(dx, axes) - y * mean(y * dx, axes))


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
    check_same_dtype("rms_norm", x=x, scale=scale)
    wide = lax.convert_element_type(x, x.dtype if accum_dtype is None else accum_dtype)
    return lax.convert_element_type(scale_and_shift(divide_by_rms(wide, axes, eps)[0], scale, None), x.dtype)


def divide_by_rms(x: Float[Array, "..."], axes: tuple[int, ...], eps: float) -> tuple[Float[Array, "..."], Any]:
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


def group_norm(
    x: Float[Array, "b ..."],
    scale: Float[Array, " c"] | None = None,
    shift: Float[Array, " c"] | None = None,
    *,
    groups: int,
    axis: int = -1,
    eps: float = 1e-5,
    accum_dtype: Any = None,
) -> Float[Array, "b ..."]:
    """Normalise to mean 0 and variance 1 over each group of channels and all axes but the batch, scale, shift.

    `axis` holds the channels, c of them, and neighbours form a group. In the dtype of `x`, or within in `accum_dtype`.
    """
    axis %= x.ndim
    if axis == 0 or x.shape[axis] % groups:
        raise ValueError(
            f"group_norm: axis {axis} of the input {x.shape} cannot be cut into {groups} groups; "
            "it must not be the batch axis, and its size a multiple of the groups."
        )
    grouped = (groups, x.shape[axis] // groups)

    def along(weight: Any) -> Any:
        return None if weight is None else lax.reshape(weight, (*grouped, *(1,) * (x.ndim - axis - 1)))

    y = layer_norm(
        lax.reshape(x, (*x.shape[:axis], *grouped, *x.shape[axis + 1 :])),
        along(scale),
        along(shift),
        axes=tuple(each for each in range(1, x.ndim + 1) if each != axis),
        eps=eps,
        accum_dtype=accum_dtype,
    )
    return lax.reshape(y, x.shape)


def scale_and_shift(
    x: Float[Array, "..."], scale: Float[Array, "..."] | None, shift: Float[Array, "..."] | None
) -> Float[Array, "..."]:
    """`x * scale + shift`, in the dtype of `x`, to which both are cast; None stands for 1 and 0."""
    if scale is not None:
        x = x * lax.convert_element_type(scale, x.dtype)
    if shift is not None:
        x = x + lax.convert_element_type(shift, x.dtype)
    return x


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
