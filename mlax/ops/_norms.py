"""Layer, RMS and local response normalization, and the mean and norm that they are computed with."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlax._gpu import (
    norm_gradient_kernel,
    norm_kernel,
    on_gpu,
    prefers_norm_kernel,
    prefers_residual_norm_kernel,
    residual_norm_kernel,
)
from mlax._jax import (
    broadcast_like,
    expand_last,
    explicit_sharding,
    is_narrow,
    mean_product,
    pcast_like,
    recomputable,
    reduce_mean,
    reduce_sum_by_product,
    with_vjp,
)
from mlax.core import check_is_dtype
from mlax.ops._checks import check_floating, check_same_dtype
from mlax.ops._cpu import is_cpu, materialize
from mlax.ops._windows import axis_window_slices


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
    check_is_dtype("layer_norm", accum_dtype=accum_dtype)
    check_same_dtype("layer_norm", x=x, scale=scale, shift=shift)
    check_floating("layer_norm", x)
    dtype, axes = jnp.dtype(accum_dtype or x.dtype), _positive(axes, x)
    norm, primals = _layer_norm_rule(axes, eps, dtype), vary_alike(x, scale, shift)
    y = norm(primals)
    return recomputable(y, norm, primals) if prefers_norm_kernel(x, scale, axes, dtype) else y


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
    check_is_dtype("rms_norm", accum_dtype=accum_dtype)
    check_same_dtype("rms_norm", x=x, scale=scale)
    check_floating("rms_norm", x)
    dtype, axes = jnp.dtype(accum_dtype or x.dtype), _positive(axes, x)
    norm, primals = _rms_norm_rule(axes, eps, dtype), vary_alike(x, _offset(scale, scale_offset, dtype))
    y = norm(primals)
    return recomputable(y, norm, primals) if prefers_norm_kernel(x, scale, axes, dtype) else y


def residual_layer_norm(
    x: Float[Array, "..."],
    scale: Float[Array, "..."] | None = None,
    shift: Float[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    *,
    axes: tuple[int, ...] = (-1,),
    eps: float = 1e-5,
    accum_dtype: Any = None,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Layer normalization before a residual branch: `(x + bias, layer_norm(x, scale, shift))`, in the dtype of `x`.

    The first output goes around the branch, the second through it: `stream + branch(y)`. The bias is what the branch
    would add last. On a GPU, all gradients of both outputs are one pass over memory.
    """
    check_is_dtype("residual_layer_norm", accum_dtype=accum_dtype)
    check_same_dtype("residual_layer_norm", x=x, scale=scale, shift=shift, bias=bias)
    dtype, axes = jnp.dtype(accum_dtype or x.dtype), _positive(axes, x)
    if _is_row(bias, x) and prefers_residual_norm_kernel(x, scale, axes, dtype):
        primals = vary_alike(x, scale, shift, bias)
        stream, y = _residual_norm_rule(True, eps, dtype)(primals)
        return stream, recomputable(y, _layer_norm_rule(axes, eps, dtype), primals[:3])
    return _add_bias(x, bias), layer_norm(x, scale, shift, axes=axes, eps=eps, accum_dtype=accum_dtype)


def residual_rms_norm(
    x: Float[Array, "..."],
    scale: Float[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    *,
    axes: tuple[int, ...] = (-1,),
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    accum_dtype: Any = None,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """RMS normalization before a residual branch: `(x + bias, rms_norm(x, scale))`, as `residual_layer_norm`."""
    check_is_dtype("residual_rms_norm", accum_dtype=accum_dtype)
    check_same_dtype("residual_rms_norm", x=x, scale=scale, bias=bias)
    dtype, axes = jnp.dtype(accum_dtype or x.dtype), _positive(axes, x)
    if _is_row(bias, x) and prefers_residual_norm_kernel(x, scale, axes, dtype):
        primals = vary_alike(x, _offset(scale, scale_offset, dtype), None, bias)
        stream, y = _residual_norm_rule(False, eps, dtype)(primals)
        return stream, recomputable(y, _rms_norm_rule(axes, eps, dtype), primals[:2])
    options: Any = {"axes": axes, "eps": eps, "scale_offset": scale_offset, "accum_dtype": accum_dtype}
    return _add_bias(x, bias), rms_norm(x, scale, **options)


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
    check_is_dtype("local_response_norm", accum_dtype=accum_dtype)
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


@functools.cache
def _layer_norm_rule(axes: tuple[int, ...], eps: float, dtype: Any) -> Any:
    """Layer norm of (x, scale, shift), whose backward pass keeps `x`, the mean and the inverse deviation only."""

    def plain(primals: Any, consts: Any = None) -> Array:
        x, scale, shift = primals
        return _plain_layer_norm(x, scale, shift, axes, eps, dtype)

    def forward(primals: Any, consts: Any) -> tuple[Array, tuple[Array, ...]]:
        x, scale, shift = primals
        by_xla = functools.partial(layer_norm_forward, axes=axes, eps=eps, dtype=dtype)
        if prefers_norm_kernel(x, scale, axes, dtype):
            kernel = functools.partial(norm_kernel, eps=eps, centered=True)
            y, *statistics = on_gpu(kernel, by_xla, x, scale, shift)
        else:
            y, *statistics = by_xla(x, scale, shift)
        return y, tuple(statistics)

    def backward(statistics: Any, primals: Any, consts: Any, dy: Array) -> Any:
        (x, scale, shift), (center, factor) = primals, statistics
        by_xla = functools.partial(layer_norm_backward, axes=axes)
        if not prefers_norm_kernel(x, scale, axes, dtype):
            return by_xla(x, center, factor, scale, shift, dy)
        return on_gpu(_norm_backward_kernel, by_xla, x, center, factor, scale, shift, dy)

    return plain if dtype == jnp.float16 else with_vjp(plain, forward, backward)


def _plain_layer_norm(
    x: Array, scale: Array | None, shift: Array | None, axes: tuple[int, ...], eps: float, dtype: Any
) -> Array:
    y = standardize(lax.convert_element_type(x, dtype), axes, eps)
    return lax.convert_element_type(scale_and_shift(y, scale, shift), x.dtype)


def layer_norm_forward(
    x: Array, scale: Array | None, shift: Array | None, axes: tuple[int, ...], eps: float, dtype: Any
) -> tuple[Array, Array, Array]:
    """The layer norm over `axes`, and the mean and the inverse deviation, in `dtype` and with axes of size 1."""
    wide = lax.convert_element_type(x, dtype)
    center, var = moments_in_two_passes(wide, axes) if is_cpu() else moments(wide, axes)
    center, factor = materialize(center), materialize(lax.rsqrt(var + eps))
    y = scale_and_shift((wide - center) * factor, scale, shift)
    return lax.convert_element_type(y, x.dtype), center, factor


def layer_norm_backward(
    x: Array,
    center: Array,
    factor: Array,
    scale: Array | None,
    shift: Array | None,
    dy: Array,
    axes: tuple[int, ...],
) -> tuple[Array, Array | None, Array | None]:
    """The cotangents of `x`, `scale` and `shift`, from the mean and the inverse deviation of `layer_norm_forward`."""
    wide = lax.convert_element_type(dy, center.dtype)
    y = (lax.convert_element_type(x, center.dtype) - center) * factor
    by_y = wide * y
    constant, slope = (materialize(_mean_scaled(each, scale, axes)) for each in (wide, by_y))
    dx = factor * (scale_and_shift(wide, scale, None) - constant - y * slope)
    return lax.convert_element_type(dx, x.dtype), _sum_like(scale, by_y), _sum_like(shift, wide)


def _norm_backward_kernel(
    x: Array, center: Array | None, factor: Array, scale: Array, shift: Array | None, dy: Array, *stream_grad: Array
) -> tuple[Any, ...]:
    """The cotangents of `x`, `scale` and `shift` by a kernel; of a residual norm that of the bias, too, in float32."""
    dx, sums = norm_gradient_kernel(x, center, factor, scale, dy, *stream_grad, has_shift=shift is not None)
    dscale = lax.convert_element_type(sums[0], scale.dtype)
    dshift = None if shift is None else lax.convert_element_type(sums[1], shift.dtype)
    return dx, dscale, dshift, *[sums[-1] for _ in stream_grad]


@functools.cache
def _rms_norm_rule(axes: tuple[int, ...], eps: float, dtype: Any) -> Any:
    """RMS norm of (x, scale), whose backward pass keeps `x` and the inverse root mean square only."""

    def plain(primals: Any, consts: Any = None) -> Array:
        x, scale = primals
        return _plain_rms_norm(x, scale, axes, eps, dtype)

    def forward(primals: Any, consts: Any) -> tuple[Array, Array]:
        x, scale = primals
        by_xla = functools.partial(_rms_norm_forward, axes=axes, eps=eps, dtype=dtype)
        if not prefers_norm_kernel(x, scale, axes, dtype):
            return by_xla(x, scale)
        return on_gpu(lambda x, scale: norm_kernel(x, scale, None, eps=eps, centered=False)[::2], by_xla, x, scale)

    def backward(factor: Array, primals: Any, consts: Any, dy: Array) -> Any:
        x, scale = primals
        by_xla = functools.partial(_rms_norm_backward, axes=axes)
        if not prefers_norm_kernel(x, scale, axes, dtype):
            return by_xla(x, factor, scale, dy)

        def kernel(x: Array, factor: Array, scale: Array, dy: Array) -> tuple[Any, ...]:
            return _norm_backward_kernel(x, None, factor, scale, None, dy)[:2]

        return on_gpu(kernel, by_xla, x, factor, scale, dy)

    return plain if dtype == jnp.float16 else with_vjp(plain, forward, backward)


def _plain_rms_norm(x: Array, scale: Array | None, axes: tuple[int, ...], eps: float, dtype: Any) -> Array:
    y = divide_by_rms(lax.convert_element_type(x, dtype), axes, eps)[0]
    return lax.convert_element_type(scale_and_shift(y, scale, None), x.dtype)


def _rms_norm_forward(
    x: Array, scale: Array | None, axes: tuple[int, ...], eps: float, dtype: Any
) -> tuple[Array, Array]:
    wide = lax.convert_element_type(x, dtype)
    factor = materialize(lax.rsqrt(mean(wide * wide, axes) + eps))
    return lax.convert_element_type(scale_and_shift(wide * factor, scale, None), x.dtype), factor


def _rms_norm_backward(
    x: Array, factor: Array, scale: Array | None, dy: Array, axes: tuple[int, ...]
) -> tuple[Array, Array | None]:
    wide, y = lax.convert_element_type(dy, factor.dtype), lax.convert_element_type(x, factor.dtype) * factor
    by_y = wide * y
    slope = materialize(_mean_scaled(by_y, scale, axes))
    dx = factor * (scale_and_shift(wide, scale, None) - y * slope)
    return lax.convert_element_type(dx, x.dtype), _sum_like(scale, by_y)


@functools.cache
def _residual_norm_rule(centered: bool, eps: float, dtype: Any) -> Any:
    """`(x + bias, norm(x))` of (x, scale, shift, bias) over the last axis, whose gradients are one kernel."""

    def plain(primals: Any, consts: Any = None) -> tuple[Array, Array]:
        x, scale, shift, bias = primals
        axes = (x.ndim - 1,)
        if centered:
            return _add_bias(x, bias), _plain_layer_norm(x, scale, shift, axes, eps, dtype)
        return _add_bias(x, bias), _plain_rms_norm(x, scale, axes, eps, dtype)

    def forward(primals: Any, consts: Any) -> tuple[tuple[Array, Array], tuple[Array | None, Array]]:
        x, scale, shift, bias = primals
        if bias is None:  # then x is added to as well, for which XLA would compute the addition that gives it again
            x = lax.optimization_barrier(x)
        kernel = functools.partial(residual_norm_kernel, eps=eps, centered=centered)
        stream, y, center, factor = on_gpu(kernel, normalize, x, scale, shift, bias)
        return (stream, y), (center, factor)

    def normalize(
        x: Array, scale: Array, shift: Array | None, bias: Array | None
    ) -> tuple[Array, Array, Array | None, Array]:
        stream = _add_bias(x, bias)
        if centered:
            return stream, *layer_norm_forward(x, scale, shift, (x.ndim - 1,), eps, dtype)
        y, factor = _rms_norm_forward(x, scale, (x.ndim - 1,), eps, dtype)
        return stream, y, None, factor

    def backward(statistics: Any, primals: Any, consts: Any, cotangents: tuple[Array, Array]) -> Any:
        (x, scale, shift, bias), (stream_grad, dy) = primals, cotangents
        arrays = (x, *statistics, scale, shift, dy, stream_grad)
        dx, dscale, dshift, dbias = on_gpu(_norm_backward_kernel, differentiate, *arrays)
        return dx, dscale, dshift, None if bias is None else lax.convert_element_type(dbias, bias.dtype)

    def differentiate(
        x: Array, center: Any, factor: Array, scale: Array, shift: Any, dy: Array, stream_grad: Array
    ) -> tuple[Any, ...]:
        if centered:
            dx, dscale, dshift = layer_norm_backward(x, center, factor, scale, shift, dy, (x.ndim - 1,))
        else:
            (dx, dscale), dshift = _rms_norm_backward(x, factor, scale, dy, (x.ndim - 1,)), None
        dbias = reduce_sum_by_product(lax.convert_element_type(stream_grad, dtype), tuple(range(x.ndim - 1)))
        return dx + stream_grad, dscale, dshift, dbias

    return with_vjp(plain, forward, backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def standardize(x: Array, axes: tuple[int, ...], eps: float) -> Array:
    """`(x - mean) / sqrt(var + eps)`."""
    return divide_by_rms(_subtract_mean(x, axes), axes, eps)[0]


@standardize.defjvp
def _(axes: tuple[int, ...], eps: float, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """The chain rule with its terms collected; by JAX's own derivative, a training step takes twice as long."""
    (x,), (dx,) = primals, tangents
    y, factor, _ = divide_by_rms(_subtract_mean(x, axes), axes, eps)
    return y, broadcast_like(factor, x) * (_subtract_mean(dx, axes) - y * broadcast_like(mean(y * dx, axes), x))


def _subtract_mean(x: Array, axes: tuple[int, ...]) -> Array:
    return x - broadcast_like(mean(x, axes), x)


def divide_by_rms(x: Array, axes: tuple[int, ...], eps: float, axis_name: Any = None) -> tuple[Array, Array, Array]:
    """`x / sqrt(mean(x * x) + eps)` over `axes`, the factor, and the mean square.

    In float16 squares neither overflow nor underflow, and only the mean square may be infinite.
    """
    if x.dtype != jnp.float16:
        square = global_mean(x * x, axes, axis_name)
        factor = lax.rsqrt(square + eps)
        return x * broadcast_like(factor, x), factor, square
    # the result is the same for x / size and sqrt(eps) / size, which are both at most 1
    axes = tuple(axis % x.ndim for axis in axes)
    size = lax.expand_dims(lax.reduce_max(lax.abs(lax.stop_gradient(x)), axes), axes)
    size = size if axis_name is None else lax.pmax(size, axis_name)
    size = lax.max(size, lax.full_like(size, math.sqrt(eps)))
    x, root = x / size, math.sqrt(eps) / size
    square = global_mean(x * x, axes, axis_name)
    factor = lax.rsqrt(square + root * root)
    return x * broadcast_like(factor, x), factor / size, square * size * size


def global_mean(x: Array, axes: tuple[int, ...], axis_name: Any) -> Array:
    """The mean over `axes`, and over all devices along `axis_name` if given."""
    local = mean(x, axes)
    return local if axis_name is None else lax.pmean(local, axis_name)


def scale_and_shift(x: Array, scale: Array | None, shift: Array | None) -> Array:
    """`x * scale + shift`, in the dtype of `x`, to which both are cast; None for 1 and 0."""
    if scale is not None:
        x = x * expand_last(lax.convert_element_type(scale, x.dtype), x)
    if shift is not None:
        x = x + expand_last(lax.convert_element_type(shift, x.dtype), x)
    return x


def _is_row(bias: Array | None, x: Array) -> bool:
    return bias is None or bias.shape == x.shape[-1:]


def _add_bias(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + expand_last(bias, x)


def _offset(scale: Array | None, offset: float, dtype: Any) -> Array | None:
    """`scale + offset` in `dtype`, or the scale as it is where there is nothing to add."""
    return lax.convert_element_type(scale, dtype) + offset if scale is not None and offset else scale


def moments(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """The mean and the variance over `axes`, which remain as axes of size 1, in one pass over `x` where it is precise.

    The first element is subtracted before, so that no digits cancel out. A narrow dtype does not have the digits, and
    an explicitly sharded axis does not have a first element.
    """
    if is_narrow(x.dtype) or 0 in x.shape or explicit_sharding(x, axes) is not None:
        return moments_in_two_passes(x, axes)
    first = x
    for axis in axes:
        first = lax.slice_in_dim(first, 0, 1, axis=axis)
    away = x - first
    center, square = mean(away, axes), mean(away * away, axes)
    return center + first, lax.max(square - center * center, lax.full_like(square, 0))


def moments_in_two_passes(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """The mean and the variance over `axes`, which remain as axes of size 1."""
    center = mean(x, axes)
    away = x - center
    return center, mean(away * away, axes)


def vary_alike(*arrays: Array | None) -> tuple[Any, ...]:
    """The arrays, all varying over the manual mesh axes that any of them varies over, so that gradients are summed."""
    return tuple(None if array is None else pcast_like(array, arrays) for array in arrays)


def _mean_scaled(x: Array, scale: Array | None, axes: tuple[int, ...]) -> Array:
    """The mean of `x * scale` over `axes`, which remain as axes of size 1."""
    if scale is None:
        return mean(x, axes)
    if axes == tuple(range(x.ndim - scale.ndim, x.ndim)):
        return mean_product(x, lax.convert_element_type(scale, x.dtype))
    return mean(scale_and_shift(x, scale, None), axes)


def _sum_like(weight: Array | None, x: Array) -> Array | None:
    """`x`, summed over the axes that `weight` is broadcast along by `expand_last`, in its shape and dtype."""
    if weight is None:
        return None
    lead = x.ndim - weight.ndim
    kept = [lead + axis for axis, size in enumerate(weight.shape) if size == x.shape[lead + axis]]
    total = reduce_sum_by_product(x, tuple(axis for axis in range(x.ndim) if axis not in kept))
    return lax.convert_element_type(lax.reshape(total, weight.shape), weight.dtype)


def _positive(axes: tuple[int, ...], x: Any) -> tuple[int, ...]:
    return tuple(axis % x.ndim for axis in axes)
