"""Batch and group normalization: by statistics of each channel, or of each group of channels."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlax._jax import broadcast_like, divide_by_count, is_narrow, reduce_sum, varying_axes, with_jvps, with_vjp
from mlax.core import check_is_dtype
from mlax.ops._checks import check_floating, check_same_dtype
from mlax.ops._cpu import is_cpu
from mlax.ops._image_forms import is_gpu
from mlax.ops._norms import (
    divide_by_rms,
    global_mean,
    mean,
    moments,
    moments_in_two_passes,
    scale_and_shift,
    standardize,
    vary_alike,
)

Activation = Callable[[Any], Any]  # elementwise

CANCELLATION = 64  # mean ** 2 / variance up to which mean(x * x) - mean(x) ** 2 is precise enough


def batch_norm(
    x: Float[Array, "..."],
    mean: Float[Array, " c"],
    var: Float[Array, " c"],
    scale: Float[Array, " c"] | None = None,
    shift: Float[Array, " c"] | None = None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    residual: Float[Array, "..."] | None = None,
    activation: Activation | None = None,
) -> Float[Array, "..."]:
    """Batch normalization: `(x - mean) / sqrt(var + eps) * scale + shift` for each channel along `axis`, in the dtype
    of `x`.

    It is computed in the dtype of the statistics, and the result cast once, at the end. The residual is added to it,
    and the activation applied.
    """
    check_same_dtype("batch_norm", x=x, scale=scale, shift=shift, residual=residual)
    check_same_dtype("batch_norm", mean=mean, var=var)
    check_floating("batch_norm", x)
    others = _other_axes(x, axis)
    center, factor = (lax.expand_dims(each, others) for each in (mean, lax.rsqrt(var + eps)))
    y = _scale_centered(x, center, factor, *_expand_channels(others, scale, shift))
    return _activate(y, residual, activation)


def normalize_batch(
    x: Float[Array, "..."],
    scale: Float[Array, " c"] | None = None,
    shift: Float[Array, " c"] | None = None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    residual: Float[Array, "..."] | None = None,
    activation: Activation | None = None,
    axis_name: Any = None,
    accum_dtype: Any = None,
) -> tuple[Float[Array, "..."], Float[Array, " c"], Float[Array, " c"], Any]:
    """`batch_norm` of `x` by its own `batch_statistics`, and these.

    In float16 the result is right for a variance beyond its range, too, which is then infinite.
    """
    check_same_dtype("normalize_batch", x=x, scale=scale, shift=shift, residual=residual)
    check_floating("normalize_batch", x)
    dtype, others = jnp.dtype(accum_dtype or x.dtype), _other_axes(x, axis)
    names = () if axis_name is None else axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if dtype == jnp.float16 or not varying_axes(x).issuperset(names):  # `vmap` cannot batch the rule's own sums over it
        y, center, var = _normalize_batch_plainly(x, scale, shift, others, eps, dtype, names)
        y = _activate(y, residual, activation)
    else:
        center, var = _channel_moments(others)(lax.convert_element_type(x, dtype))
        center, var = _pool_moments(center, var, names)
        statistics, is_fused = (center, lax.rsqrt(var + eps)), prefers_fused_activation(activation)
        norm = _channel_norm_rule(others, axis % x.ndim, None, eps, dtype, names, activation if is_fused else None)
        y = norm(*_vary_primals((x, scale, shift, residual if is_fused else None), statistics))
        y = y if is_fused else _activate(y, residual, activation)
    return y, lax.squeeze(center, others), lax.squeeze(var, others), _count(x, others, names)


def prefers_fused_activation(activation: Activation | None) -> bool:
    """Whether the backward pass of a norm is that of its activation, too (docs/design/conv-layouts.md): on a GPU.

    XLA for a GPU would write the cotangent behind the activation to memory, and read it twice. A CPU has it in its
    caches.
    """
    return activation is not None and is_gpu()


def batch_statistics(
    x: Float[Array, "..."], *, axis: int = -1, axis_name: Any = None, accum_dtype: Any = None
) -> tuple[Float[Array, " c"], Float[Array, " c"], Any]:
    """The mean and the (biased) variance over all axes but `axis`, and how many elements each is taken over.

    Both are in the dtype of `x`, or in `accum_dtype`, and over all devices along `axis_name` if given.
    """
    check_is_dtype("batch_statistics", accum_dtype=accum_dtype)
    return normalize_batch(x, axis=axis, axis_name=axis_name, accum_dtype=accum_dtype)[1:]


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
    check_is_dtype("group_norm", accum_dtype=accum_dtype)
    axis %= x.ndim
    if axis == 0 or x.shape[axis] % groups:
        raise ValueError(
            f"group_norm: axis {axis} of the input {x.shape} cannot be split into {groups} groups; "
            "it must not be the batch axis, and its size must be a multiple of the groups."
        )
    check_same_dtype("group_norm", x=x, scale=scale, shift=shift)
    check_floating("group_norm", x)
    dtype = jnp.dtype(accum_dtype or x.dtype)
    if dtype == jnp.float16:
        return _normalize_groups_plainly(x, scale, shift, groups, axis, eps, dtype)
    inner = tuple(each for each in range(1, x.ndim) if each != axis)
    each, var = _channel_moments(inner)(lax.convert_element_type(lax.stop_gradient(x), dtype))
    center = _average_groups(each, axis, groups)
    var = _average_groups(var + (each - center) * (each - center), axis, groups)
    norm = _channel_norm_rule(inner, axis, groups, eps, dtype)
    return norm(*_vary_primals((x, scale, shift, None), (center, lax.rsqrt(var + eps))))


@functools.cache
def _channel_norm_rule(
    axes: tuple[int, ...],
    axis: int,
    groups: int | None,
    eps: float,
    dtype: Any,
    names: tuple[Any, ...] = (),
    activation: Activation | None = None,
) -> Any:
    """Batch norm and group norm of (x, scale, shift, residual), given the mean and inverse deviation of each channel.

    These are over `axes`, over the mesh axes `names` and, unless `groups` is None, over each group of channels along
    `axis`. The derivative is that of `plain`, which computes them, too. It keeps the primals and the statistics only,
    and takes two passes over `x` and `dy`, each with the derivative of the activation, which is computed again.
    """

    def plain(primals: Any, consts: Any) -> Array:
        x, scale, shift, residual = primals
        if groups is None:
            y = _normalize_batch_plainly(x, scale, shift, axes, eps, dtype, names)[0]
        else:
            y = _normalize_groups_plainly(x, scale, shift, groups, axis, eps, dtype)
        return _activate(y, residual, activation)

    def forward(primals: Any, statistics: Any) -> tuple[Array, None]:
        x, scale, shift, residual = primals
        y = _scale_centered(x, *statistics, *_expand_channels(others, scale, shift))
        return _activate(y, residual, activation), None

    def backward(_: None, primals: Any, statistics: Any, dy: Array) -> Any:
        (x, scale, shift, residual), (center, factor) = primals, statistics
        scaled, bias = _expand_channels(others, scale, shift)
        scaled = 1.0 if scaled is None else lax.convert_element_type(scaled, dtype)
        centered, steepness = lax.convert_element_type(x, dtype) - center, factor * scaled

        def pull_back(steepness: Array) -> Array:
            """`dy` times the derivative of the activation."""
            if activation is None:
                return dy
            y = scale_and_shift(centered * steepness, None, bias)
            if residual is not None:
                y = lax.convert_element_type(y, x.dtype) + residual
            return jax.vjp(activation, y)[1](lax.convert_element_type(dy, y.dtype))[0]

        # XLA would write the derivative to memory for the kernels that need it. It does not know that three copies are
        # equal, and computes one again where `x` is read anyway: for `dx`, and in sums with a term of `x`.
        copies = (steepness,) * 3 if activation is None else lax.optimization_barrier((steepness,) * 3)
        summed, multiplied, passed = map(pull_back, copies)
        summed, multiplied = (lax.convert_element_type(each, dtype) for each in (summed, multiplied))
        has_term = activation is not None and not is_narrow(dtype)
        summed = summed * (1.0 + centered * factor) if has_term else summed
        dshift, dscale = (lax.expand_dims(reduce_sum(each, axes), axes) for each in (summed, multiplied * centered))
        dscale = dscale * factor
        dshift = dshift - dscale if has_term else dshift
        dresidual = None
        if residual is not None:
            passed = dresidual = lax.optimization_barrier(lax.convert_element_type(passed, residual.dtype))
        constant, slope = dshift * scaled, dscale * scaled  # their means are the gradients of mean and deviation
        if groups is not None:
            constant, slope = (_average_groups(each, axis, groups) for each in (constant, slope))
        if names:
            constant, slope = lax.psum((constant, slope), names)
        count = _count(x, axes, names)
        constant, slope = (factor * divide_by_count(each, count) for each in (constant, factor * slope))
        dx = lax.convert_element_type(passed, dtype) * steepness - (centered * slope + constant)
        gradients = _sum_examples(scale, dscale, axis), _sum_examples(shift, dshift, axis)
        return lax.convert_element_type(dx, x.dtype), *gradients, dresidual

    others = tuple(sorted({0, *axes}))
    return with_vjp(plain, forward, backward)


@functools.cache
def _channel_moments(axes: tuple[int, ...]) -> Any:
    """A function of `x` to its mean and its variance over `axes`, which remain as axes of size 1."""

    def change(dx: Array, x: Array) -> tuple[Array, Array]:
        centered = x - broadcast_like(mean(x, axes), x)
        return mean(dx, axes), 2.0 * mean(centered * dx, axes)

    return with_jvps(functools.partial(_compute_moments, axes=axes), change)


def _compute_moments(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """The mean and the variance over `axes`, in one pass over `x` where that is precise.

    A CPU reads a shifted array more slowly than `x` itself, so there the variance is mean(x * x) - mean(x) ** 2, unless
    its digits cancel out.
    """
    if not is_cpu() or is_narrow(x.dtype) or 0 in x.shape:
        return moments(x, axes)
    center = mean(x, axes)
    square = center * center
    var = mean(x * x, axes) - square
    cancels = jnp.any(~(square <= CANCELLATION * var) & (square > 0))
    return lax.cond(cancels, lambda: moments_in_two_passes(x, axes), lambda: (center, var))


def _pool_moments(center: Array, var: Array, names: tuple[Any, ...]) -> tuple[Array, Array]:
    """The mean and the variance over all devices along `names`, from those of each."""
    if not names:
        return center, var
    pooled = lax.pmean(center, names)
    away = center - pooled
    return pooled, lax.pmean(var + away * away, names)


def _count(x: Array, axes: tuple[int, ...], names: tuple[Any, ...]) -> Any:
    return math.prod(x.shape[each] for each in axes) * (lax.axis_size(names) if names else 1)


def _average_groups(x: Array, axis: int, groups: int) -> Array:
    """`x` with each channel along `axis` replaced by the mean of its group."""
    size = x.shape[axis] // groups
    if size == 1:
        return x
    split = lax.reshape(x, (*x.shape[:axis], groups, size, *x.shape[axis + 1 :]))
    return lax.reshape(jnp.broadcast_to(mean(split, (axis + 1,)), split.shape), x.shape)


def _scale_centered(x: Array, center: Array, factor: Array, scale: Array | None, shift: Array | None) -> Array:
    """`(x - center) * (factor * scale) + shift`, in the dtype of the statistics and cast to that of `x` at the end."""
    wide = lax.convert_element_type(x, center.dtype)
    if scale is not None:
        factor = factor * lax.convert_element_type(scale, wide.dtype)
    y = (wide - broadcast_like(center, wide)) * broadcast_like(factor, wide)
    return lax.convert_element_type(scale_and_shift(y, None, shift), x.dtype)


def _activate(y: Array, residual: Array | None, activation: Activation | None) -> Array:
    y = y if residual is None else y + residual
    return y if activation is None else activation(y)


def _normalize_batch_plainly(
    x: Array,
    scale: Array | None,
    shift: Array | None,
    axes: tuple[int, ...],
    eps: float,
    dtype: Any,
    names: tuple[Any, ...] = (),
) -> tuple[Array, Array, Array]:
    """Batch norm by its definition, differentiated by JAX; and the mean and the variance."""
    wide = lax.convert_element_type(x, dtype)
    center = global_mean(wide, axes, names or None)
    y, _, var = divide_by_rms(wide - broadcast_like(center, wide), axes, eps, names or None)
    return lax.convert_element_type(scale_and_shift(y, *_expand_channels(axes, scale, shift)), x.dtype), center, var


def _normalize_groups_plainly(
    x: Array, scale: Array | None, shift: Array | None, groups: int, axis: int, eps: float, dtype: Any
) -> Array:
    """Group norm by its definition: the layer norm of each group of channels."""
    grouped = (groups, x.shape[axis] // groups)
    axes = tuple(each for each in range(1, x.ndim + 1) if each != axis)
    weights = [
        None if weight is None else lax.reshape(weight, (*grouped, *(1,) * (x.ndim - axis - 1)))
        for weight in (scale, shift)
    ]
    wide = lax.reshape(lax.convert_element_type(x, dtype), (*x.shape[:axis], *grouped, *x.shape[axis + 1 :]))
    y = scale_and_shift(standardize(wide, axes, eps), *weights)
    return lax.convert_element_type(lax.reshape(y, x.shape), x.dtype)


def _sum_examples(weight: Array | None, total: Array, axis: int) -> Array | None:
    """The gradient of each channel's `weight`, from that of each example."""
    if weight is None:
        return None
    return lax.convert_element_type(reduce_sum(total, _other_axes(total, axis)), weight.dtype)


def _vary_primals(primals: tuple[Any, ...], statistics: tuple[Array, ...]) -> tuple[Any, Any]:
    """Both, with the primals varying over the manual mesh axes that any array varies over."""
    varying = vary_alike(*primals, *statistics)
    return varying[: len(primals)], varying[len(primals) :]


def _expand_channels(axes: tuple[int, ...], *weights: Array | None) -> list[Any]:
    return [None if weight is None else lax.expand_dims(weight, axes) for weight in weights]


def _other_axes(x: Any, axis: int) -> tuple[int, ...]:
    return tuple(each for each in range(x.ndim) if each != axis % x.ndim)
