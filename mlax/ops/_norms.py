"""Batch, layer, RMS and group normalization, and the mean and norm that they are computed with."""

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
    mean: Float[Array, " c"],
    var: Float[Array, " c"],
    scale: Float[Array, " c"] | None = None,
    shift: Float[Array, " c"] | None = None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
) -> Float[Array, "..."]:
    """`(x - mean) / sqrt(var + eps) * scale + shift` for each channel along `axis`, in the dtype of `x`.

    It is computed in the dtype of the statistics, and the result cast once, at the end.
    """
    check_same_dtype("batch_norm", x=x, scale=scale, shift=shift)
    check_same_dtype("batch_norm", mean=mean, var=var)

    def broadcastable(weight: Any) -> Any:
        return None if weight is None else lax.expand_dims(weight, _other_axes(x, axis))

    wide = lax.convert_element_type(x, mean.dtype)
    y = (wide - broadcastable(mean)) * lax.rsqrt(broadcastable(var) + eps)
    return lax.convert_element_type(_scale_and_shift(y, broadcastable(scale), broadcastable(shift)), x.dtype)


def batch_statistics(
    x: Float[Array, "..."], *, axis: int = -1, axis_name: Any = None, accum_dtype: Any = None
) -> tuple[Float[Array, " c"], Float[Array, " c"], int]:
    """The mean and the (biased) variance over all axes but `axis`, and how many elements each is taken over.

    Both are in the dtype of `x`, or in `accum_dtype`, and over all devices along `axis_name` if given.
    """
    wide = lax.convert_element_type(x, x.dtype if accum_dtype is None else accum_dtype)
    others = _other_axes(x, axis)
    count = math.prod(x.shape[each] for each in others)

    def global_mean(x: Any) -> Any:
        local = mean(x, others)
        return local if axis_name is None else lax.pmean(local, axis_name)

    center = global_mean(wide)
    centered = wide - center
    var = global_mean(centered * centered)
    total = count if axis_name is None else count * lax.axis_size(axis_name)
    return lax.squeeze(center, others), lax.squeeze(var, others), total


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

    It is computed in `accum_dtype` if given, and the result cast once, at the end.
    """
    check_same_dtype("layer_norm", x=x, scale=scale, shift=shift)
    wide = lax.convert_element_type(x, x.dtype if accum_dtype is None else accum_dtype)
    return lax.convert_element_type(_scale_and_shift(_standardize(wide, axes, eps), scale, shift), x.dtype)


def rms_norm(
    x: Float[Array, "..."],
    scale: Float[Array, "..."] | None = None,
    *,
    axes: tuple[int, ...] = (-1,),
    eps: float = 1e-6,
    accum_dtype: Any = None,
) -> Float[Array, "..."]:
    """`x / sqrt(mean(x * x) + eps) * scale` over `axes`, in the dtype of `x`.

    It is computed in `accum_dtype` if given, and the result cast once, at the end.
    """
    check_same_dtype("rms_norm", x=x, scale=scale)
    wide = lax.convert_element_type(x, x.dtype if accum_dtype is None else accum_dtype)
    return lax.convert_element_type(_scale_and_shift(_divide_by_rms(wide, axes, eps)[0], scale, None), x.dtype)


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
    """Normalize to mean 0 and variance 1 over each group of channels and all axes but the batch, then scale and shift.

    The channels, c of them, are along `axis`; each group is contiguous. In the dtype of `x`, computed in `accum_dtype`
    if given.
    """
    axis %= x.ndim
    if axis == 0 or x.shape[axis] % groups:
        raise ValueError(
            f"group_norm: axis {axis} of the input {x.shape} cannot be split into {groups} groups; "
            "it must not be the batch axis, and its size must be a multiple of the groups."
        )
    grouped = (groups, x.shape[axis] // groups)

    def broadcastable(weight: Any) -> Any:
        return None if weight is None else lax.reshape(weight, (*grouped, *(1,) * (x.ndim - axis - 1)))

    y = layer_norm(
        lax.reshape(x, (*x.shape[:axis], *grouped, *x.shape[axis + 1 :])),
        broadcastable(scale),
        broadcastable(shift),
        axes=tuple(each for each in range(1, x.ndim + 1) if each != axis),
        eps=eps,
        accum_dtype=accum_dtype,
    )
    return lax.reshape(y, x.shape)


def mean(x: Float[Array, "..."], axes: tuple[int, ...]) -> Float[Array, "..."]:
    """The mean over `axes`, which remain as axes of size 1, summed in the dtype of `x`.

    (`jnp.mean` sums float16 and bfloat16 in float32.)
    """
    axes = tuple(axis % x.ndim for axis in axes)
    count = math.prod(x.shape[axis] for axis in axes)
    # float16 ends at 65504: divide by about the square root of the count before the sum, and by the rest after it
    before = 2.0 ** min(count.bit_length() // 2, 15) if x.dtype == jnp.float16 else 1.0
    total = lax.reduce_sum(x / before if before > 1 else x, axes)
    return lax.expand_dims(total, axes) / (count / before)


def norm(x: Float[Array, "..."], axes: tuple[int, ...]) -> Float[Array, "..."]:
    """The Euclidean norm over `axes`, which remain as axes of size 1; squares neither overflow nor underflow."""
    axes = tuple(axis % x.ndim for axis in axes)
    largest = lax.stop_gradient(lax.expand_dims(lax.reduce_max(lax.abs(x), axes), axes))
    largest = jnp.where(largest > 0, largest, jnp.ones_like(largest))
    scaled = x / largest
    return largest * lax.sqrt(lax.expand_dims(lax.reduce_sum(scaled * scaled, axes), axes))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _standardize(x: Array, axes: tuple[int, ...], eps: float) -> Array:
    """`(x - mean) / sqrt(var + eps)`."""
    return _divide_by_rms(x - mean(x, axes), axes, eps)[0]


@_standardize.defjvp
def _(axes: tuple[int, ...], eps: float, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """The chain rule with its terms collected; by JAX's own derivative, a training step takes twice as long."""
    (x,), (dx,) = primals, tangents
    y, factor = _divide_by_rms(x - mean(x, axes), axes, eps)
    return y, factor * (dx - mean(dx, axes) - y * mean(y * dx, axes))


def _divide_by_rms(x: Array, axes: tuple[int, ...], eps: float) -> tuple[Array, Array]:
    """`x / sqrt(mean(x * x) + eps)` over `axes`, and its factor; in float16 squares neither overflow nor underflow."""
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


def _scale_and_shift(x: Array, scale: Array | None, shift: Array | None) -> Array:
    """`x * scale + shift`, in the dtype of `x`, to which both are cast; None for 1 and 0."""
    if scale is not None:
        x = x * lax.convert_element_type(scale, x.dtype)
    if shift is not None:
        x = x + lax.convert_element_type(shift, x.dtype)
    return x


def _other_axes(x: Any, axis: int) -> tuple[int, ...]:
    return tuple(each for each in range(x.ndim) if each != axis % x.ndim)
