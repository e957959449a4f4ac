"""Batch, layer, RMS, group and local response normalization, and the mean and norm that they are computed with."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlax._jax import broadcast_like, expand_last, reduce_mean
from mlax.ops._checks import check_floating, check_same_dtype
from mlax.ops._windows import axis_window_slices


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
    """Batch normalization: `(x - mean) / sqrt(var + eps) * scale + shift` for each channel along `axis`, in the dtype
    of `x`.

    It is computed in the dtype of the statistics, and the result cast once, at the end.
    """
    check_same_dtype("batch_norm", x=x, scale=scale, shift=shift)
    check_same_dtype("batch_norm", mean=mean, var=var)
    check_floating("batch_norm", x)
    others = _other_axes(x, axis)
    wide = lax.convert_element_type(x, mean.dtype)
    factor = lax.rsqrt(lax.expand_dims(var, others) + eps)
    y = (wide - broadcast_like(lax.expand_dims(mean, others), wide)) * broadcast_like(factor, wide)
    return lax.convert_element_type(_scale_and_shift(y, *_expand_channels(others, scale, shift)), x.dtype)


def normalize_batch(
    x: Float[Array, "..."],
    scale: Float[Array, " c"] | None = None,
    shift: Float[Array, " c"] | None = None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    axis_name: Any = None,
    accum_dtype: Any = None,
) -> tuple[Float[Array, "..."], Float[Array, " c"], Float[Array, " c"], Any]:
    """`batch_norm` of `x` by its own `batch_statistics`, and these.

    In float16 the result is right for a variance beyond its range, too, which is then infinite.
    """
    check_same_dtype("normalize_batch", x=x, scale=scale, shift=shift)
    check_floating("normalize_batch", x)
    wide = lax.convert_element_type(x, x.dtype if accum_dtype is None else accum_dtype)
    others = _other_axes(x, axis)
    center = _global_mean(wide, others, axis_name)
    y, _, var = _divide_by_rms(wide - broadcast_like(center, wide), others, eps, axis_name)
    y = lax.convert_element_type(_scale_and_shift(y, *_expand_channels(others, scale, shift)), x.dtype)
    count = math.prod(x.shape[each] for each in others) * (1 if axis_name is None else lax.axis_size(axis_name))
    return y, lax.squeeze(center, others), lax.squeeze(var, others), count


def batch_statistics(
    x: Float[Array, "..."], *, axis: int = -1, axis_name: Any = None, accum_dtype: Any = None
) -> tuple[Float[Array, " c"], Float[Array, " c"], Any]:
    """The mean and the (biased) variance over all axes but `axis`, and how many elements each is taken over.

    Both are in the dtype of `x`, or in `accum_dtype`, and over all devices along `axis_name` if given.
    """
    return normalize_batch(x, axis=axis, axis_name=axis_name, accum_dtype=accum_dtype)[1:]


def layer_norm(
    x: Float[Array, "..."],
    scale: Float[Array, "..."] | None = None,
    shift: Float[Array, "..."] | None = None,
    *,
    axes: tuple[int, ...] = (-1,),
    eps: float = 1e-5,
    accum_dtype: Any = None,
) -> Float[Array, "..."]:
    """Layer normalization: `(x - mean) / sqrt(var + eps) * scale + shift` over `axes`, in the dtype of `x`.

    It is computed in `accum_dtype` if given, and the result cast once, at the end.
    """
    check_same_dtype("layer_norm", x=x, scale=scale, shift=shift)
    check_floating("layer_norm", x)
    wide = lax.convert_element_type(x, x.dtype if accum_dtype is None else accum_dtype)
    return lax.convert_element_type(_scale_and_shift(_standardize(wide, axes, eps), scale, shift), x.dtype)


def rms_norm(
    x: Float[Array, "..."],
    scale: Float[Array, "..."] | None = None,
    *,
    axes: tuple[int, ...] = (-1,),
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    accum_dtype: Any = None,
) -> Float[Array, "..."]:
    """RMS normalization: `x / sqrt(mean(x * x) + eps) * (scale + scale_offset)` over `axes`, in the dtype of `x`.

    It is computed in `accum_dtype` if given, and the result cast once, at the end.
    """
    check_same_dtype("rms_norm", x=x, scale=scale)
    check_floating("rms_norm", x)
    wide = lax.convert_element_type(x, x.dtype if accum_dtype is None else accum_dtype)
    if scale is not None and scale_offset:
        scale = lax.convert_element_type(scale, wide.dtype) + scale_offset
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
    """Group normalization: normalize to mean 0 and variance 1 over each group of channels and all axes but the batch,
    then scale and shift.

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


def local_response_norm(
    x: Float[Array, "..."],
    size: int,
    *,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 1.0,
    axis: int = -1,
    accum_dtype: Any = None,
) -> Float[Array, "..."]:
    """Local response normalization: `x / (k + alpha * mean(x * x)) ** beta`, the mean over `size` neighboring channels,
    in the dtype of `x`.

    The channels are along `axis`; those beyond the first and the last count as 0. It is computed in `accum_dtype` if
    given. https://papers.nips.cc/paper/4824, section 3.3, with PyTorch's mean in place of the sum.
    """
    check_floating("local_response_norm", x)
    axis %= x.ndim
    wide = lax.convert_element_type(x, x.dtype if accum_dtype is None else accum_dtype)
    root = wide * math.sqrt(alpha / size)  # squared after the scaling, so that float16 does not overflow
    widths = [(size // 2, (size - 1) // 2, 0) if each == axis else (0, 0, 0) for each in range(x.ndim)]
    padded = lax.pad(root * root, jnp.zeros((), wide.dtype), widths)
    slices = axis_window_slices(padded, axis, x.shape[axis], size, 1, 1)
    y = wide * (functools.reduce(lax.add, slices) + k) ** -beta
    return lax.convert_element_type(y, x.dtype)


def mean(x: Float[Array, "..."], axes: tuple[int, ...]) -> Float[Array, "..."]:
    """The mean over `axes`, which remain as axes of size 1, in the dtype of `x`; it overflows only if the result does.

    (`jnp.mean` sums float16 and bfloat16 in float32.)
    """
    axes = tuple(axis % x.ndim for axis in axes)
    return lax.expand_dims(reduce_mean(x, axes), axes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _standardize(x: Array, axes: tuple[int, ...], eps: float) -> Array:
    """`(x - mean) / sqrt(var + eps)`."""
    return _divide_by_rms(_subtract_mean(x, axes), axes, eps)[0]


@_standardize.defjvp
def _(axes: tuple[int, ...], eps: float, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """The chain rule with its terms collected; by JAX's own derivative, a training step takes twice as long."""
    (x,), (dx,) = primals, tangents
    y, factor, _ = _divide_by_rms(_subtract_mean(x, axes), axes, eps)
    return y, broadcast_like(factor, x) * (_subtract_mean(dx, axes) - y * broadcast_like(mean(y * dx, axes), x))


def _subtract_mean(x: Array, axes: tuple[int, ...]) -> Array:
    return x - broadcast_like(mean(x, axes), x)


def _divide_by_rms(x: Array, axes: tuple[int, ...], eps: float, axis_name: Any = None) -> tuple[Array, Array, Array]:
    """`x / sqrt(mean(x * x) + eps)` over `axes`, the factor, and the mean square.

    In float16 squares neither overflow nor underflow, and only the mean square may be infinite.
    """
    if x.dtype != jnp.float16:
        square = _global_mean(x * x, axes, axis_name)
        factor = lax.rsqrt(square + eps)
        return x * broadcast_like(factor, x), factor, square
    # the result is the same for x / size and sqrt(eps) / size, which are both at most 1
    axes = tuple(axis % x.ndim for axis in axes)
    size = lax.expand_dims(lax.reduce_max(lax.abs(lax.stop_gradient(x)), axes), axes)
    size = size if axis_name is None else lax.pmax(size, axis_name)
    size = lax.max(size, lax.full_like(size, math.sqrt(eps)))
    x, root = x / size, math.sqrt(eps) / size
    square = _global_mean(x * x, axes, axis_name)
    factor = lax.rsqrt(square + root * root)
    return x * broadcast_like(factor, x), factor / size, square * size * size


def _global_mean(x: Array, axes: tuple[int, ...], axis_name: Any) -> Array:
    """The mean over `axes`, and over all devices along `axis_name` if given."""
    local = mean(x, axes)
    return local if axis_name is None else lax.pmean(local, axis_name)


def _scale_and_shift(x: Array, scale: Array | None, shift: Array | None) -> Array:
    """`x * scale + shift`, in the dtype of `x`, to which both are cast; None for 1 and 0."""
    if scale is not None:
        x = x * expand_last(lax.convert_element_type(scale, x.dtype), x)
    if shift is not None:
        x = x + expand_last(lax.convert_element_type(shift, x.dtype), x)
    return x


def _expand_channels(axes: tuple[int, ...], *weights: Array | None) -> list[Array | None]:
    return [None if weight is None else lax.expand_dims(weight, axes) for weight in weights]


def _other_axes(x: Any, axis: int) -> tuple[int, ...]:
    return tuple(each for each in range(x.ndim) if each != axis % x.ndim)
