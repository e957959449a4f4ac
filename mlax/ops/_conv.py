"""Convolution and transposed convolution over any number of spatial axes."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlax._jax import explicit_sharding
from mlax.ops._checks import check_same_dtype
from mlax.ops._conv_spmd import has_several_auto_axes, unshard_spatial_axes, with_unsharded_kernel_grad
from mlax.ops._cpu import use_chunked_kernel_grad, with_chunked_kernel_grad
from mlax.ops._layout import Layout, parse_layout
from mlax.ops._windows import (
    Padding,
    PadWith,
    Sizes,
    Windows,
    pad,
    resolve_padding,
    resolve_windows,
    sizes_per_axis,
    window_slices,
)

MAX_DEPTHWISE_WINDOW = 64  # places of a window that are too many to be added up one by one


def conv(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    bias: Float[Array, " f"] | None = None,
    *,
    strides: Sizes = 1,
    padding: Padding = "SAME",
    pad_with: PadWith = "zeros",
    dilation: Sizes = 1,
    groups: int = 1,
    layout: str = "channel_last",
    precision: jax.lax.PrecisionLike = None,
    accum_dtype: Any = None,
) -> Float[Array, "..."]:
    """The sum of each window of `x` times `kernel` (not flipped), plus `bias`, in the dtype of `x`.

    (b, *spatial, c) and (f, *window, c / groups) to (b, *spatial, f), or what `layout` says. Each group of channels
    makes its own f / groups features. The sum of products runs in `accum_dtype` if one is given.
    """
    check_same_dtype("conv", x=x, kernel=kernel, bias=bias)
    axes = parse_layout("conv", layout, x)
    check_kernel("conv", x, kernel, axes, groups)
    window = tuple(kernel.shape[axis] for axis in axes.window)
    where = resolve_windows("conv", x, axes, window, strides, padding, dilation)
    pads = where.padding
    if pad_with != "zeros":
        x, pads = pad(x, axes.spatial, pads, pad_with), ((0, 0),) * len(pads)
    if use_depthwise_products(x, kernel, axes, groups, accum_dtype):
        y = depthwise_products(x, kernel, axes, where._replace(padding=pads), accum_dtype)
    else:

        def convolve(x: Array, kernel: Array) -> Array:
            return lax.conv_general_dilated(
                x,
                kernel,
                where.strides,
                pads,
                rhs_dilation=where.dilation,
                dimension_numbers=dimension_numbers(axes),
                feature_group_count=groups,
                precision=precision,
                preferred_element_type=accum_dtype,
            )

        chunks = use_chunked_kernel_grad(x, axes, groups, accum_dtype)
        way = with_chunked_kernel_grad(convolve, axes, where._replace(padding=pads), precision) if chunks else convolve
        way = with_unsharded_kernel_grad(way) if groups > 1 and has_several_auto_axes(x) else way
        y = unshard_spatial_axes(way(unshard_spatial_axes(x, axes), kernel), axes)
    return add_bias(y, bias, axes, x.dtype)


def use_depthwise_products(x: Array, kernel: Array, axes: Layout, groups: int, accum_dtype: Any) -> bool:
    """Whether to add up products of whole arrays, one for each place of the window: for depthwise kernels on a CPU.

    XLA's CPU compiler has no fast loop for them (benchmarks/layers.py). In a narrow dtype each sum would be rounded,
    and large windows would make large programs.
    """
    return (
        jax.default_backend() == "cpu"
        and groups == x.shape[axes.channel] == kernel.shape[axes.outputs]
        and math.prod(kernel.shape) <= MAX_DEPTHWISE_WINDOW * groups
        and jnp.finfo(accum_dtype or x.dtype).bits >= 32
    )


def depthwise_products(x: Array, kernel: Array, axes: Layout, where: Windows, accum_dtype: Any) -> Array:
    wide, weights = (lax.convert_element_type(each, accum_dtype or x.dtype) for each in (x, kernel))
    weights = lax.transpose(weights, (*axes.window, axes.outputs, axes.inputs)).reshape(-1, kernel.shape[axes.outputs])
    pieces = window_slices(pad(wide, axes.spatial, where.padding, "zeros"), axes, where)
    others = tuple(axis for axis in range(x.ndim) if axis != axes.channel)
    products = [piece * lax.expand_dims(weight, others) for piece, weight in zip(pieces, weights, strict=True)]
    return functools.reduce(lax.add, products)


def dimension_numbers(axes: Layout) -> lax.ConvDimensionNumbers:
    """The same axes in JAX's own words."""
    image = (axes.batch, axes.channel, *axes.spatial)
    return lax.ConvDimensionNumbers(image, (axes.outputs, axes.inputs, *axes.window), image)


def add_bias(y: Float[Array, "..."], bias: Float[Array, " f"] | None, axes: Layout, dtype: Any) -> Float[Array, "..."]:
    """`y + bias` along the channel axis, in the dtype of `y`; then cast."""
    if bias is not None:
        others = tuple(axis for axis in range(y.ndim) if axis != axes.channel)
        y = y + lax.expand_dims(lax.convert_element_type(bias, y.dtype), others)
    return lax.convert_element_type(y, dtype)


def check_kernel(name: str, x: Array, kernel: Array, axes: Layout, groups: int) -> None:
    """Refuse a kernel that does not fit the channels of `x`."""
    if kernel.ndim != x.ndim or kernel.shape[axes.inputs] * groups != x.shape[axes.channel]:
        raise ValueError(
            f"{name}: the input has the shape {x.shape} but the kernel {kernel.shape}, in {groups} groups; the kernel "
            f"must have {x.ndim} axes, and its axis {axes.inputs}, times the groups, be as long as axis "
            f"{axes.channel} of the input.{_layout_hint(x.shape, kernel.shape[axes.inputs] * groups, axes.channel)}"
        )
    check_groups(name, groups, x.shape[axes.channel], kernel.shape[axes.outputs])


def _layout_hint(shape: tuple[int, ...], channels: int, axis: int) -> str:
    """The layout in which an input of this shape would fit, as a sentence; nothing if there is none."""
    for where, layout, other in (("first", "channel_first", 1), ("last", "channel_last", len(shape) - 1)):
        if shape[other] == channels and other != axis:
            return f" If the channels come {where}: layout={layout!r}."
    return ""


def check_groups(name: str, groups: int, channels: int, features: int) -> None:
    """Refuse groups that do not divide the channels and the features."""
    if type(groups) is not int or groups < 1 or channels % groups or features % groups:
        raise ValueError(
            f"{name}: groups is {groups}, but must be a whole number that divides the {channels} channels of the "
            f"input and the {features} features."
        )


def conv_transpose(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    bias: Float[Array, " f"] | None = None,
    *,
    strides: Sizes = 1,
    padding: Padding = "SAME",
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    layout: str = "channel_last",
    precision: jax.lax.PrecisionLike = None,
    accum_dtype: Any = None,
) -> Float[Array, "..."]:
    """The sum of one window for each place of `x`, its values times `kernel`, plus `bias`, in the dtype of `x`.

    (b, *spatial, c) and (f, *window, c / groups) to (b, *larger, f), or what `layout` says. The windows lie
    `strides` apart, and `padding` places are cut off at both ends, as described in `stamps`.
    """
    check_same_dtype("conv_transpose", x=x, kernel=kernel, bias=bias)
    axes = parse_layout("conv_transpose", layout, x)
    check_kernel("conv_transpose", x, kernel, axes, groups)
    window = tuple(kernel.shape[axis] for axis in axes.window)
    where = resolve_transposed_windows("conv_transpose", x, axes, window, strides, padding, output_padding, dilation)

    def spread(x: Array, kernel: Array) -> Array:
        return lax.conv_general_dilated(
            x,
            lax.rev(kernel, axes.window),
            (1,) * len(window),
            where.padding,
            lhs_dilation=where.strides,
            rhs_dilation=where.dilation,
            dimension_numbers=dimension_numbers(axes),
            feature_group_count=groups,
            precision=precision,
            preferred_element_type=accum_dtype,
        )

    apart = max(where.strides, default=1) > 1 and accum_dtype is None and jax.default_backend() == "cpu"
    apart = apart and not (
        groups > 1 and explicit_sharding(x)
    )  # of whose groups JAX would merge the axis with a split one
    way = with_undilated_kernel_grad(spread) if apart else spread
    way = with_unsharded_kernel_grad(way) if groups > 1 and has_several_auto_axes(x) else way
    y = unshard_spatial_axes(way(unshard_spatial_axes(x, axes), kernel), axes)
    return add_bias(y, bias, axes, x.dtype)


def with_undilated_kernel_grad(spread: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """The same function with another way to the gradient of the kernel: that of the convolution it is the transpose of.

    By JAX's own rule it is a convolution of the input with zeros between its places, for which XLA's CPU compiler has
    no fast loop: a training step takes ten times as long (benchmarks/layers.py).
    """
    made = jax.custom_jvp(spread)

    @made.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x, kernel), (x_dot, kernel_dot) = primals, tangents
        y = made(x, kernel)

        def kernel_gradient(y_grad: Array) -> Array:
            def gather(kernel: Array) -> Array:
                return jax.linear_transpose(lambda x: spread(x, kernel), x)(y_grad)[0]

            return jax.linear_transpose(gather, kernel)(x)[0]

        return y, made(x_dot, kernel) + jax.linear_transpose(kernel_gradient, y)(kernel_dot)[0]

    return made


class TransposedWindows(NamedTuple):
    """Where the windows of a transposed convolution lie, as a convolution of the spread input sees it."""

    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]


def resolve_transposed_windows(
    name: str,
    x: Any,
    layout: Layout,
    window: Sizes,
    strides: Sizes,
    padding: Padding,
    output_padding: Sizes,
    dilation: Sizes,
) -> TransposedWindows:
    """Where the windows lie; `name` is who asks, for the errors.

    n places, a stride s and windows that span k places make (n - 1) s + k - cut + output_padding places, as in
    PyTorch. "VALID" cuts nothing. "SAME" makes n s: it is the transpose of the "SAME" convolution of that many.
    "CAUSAL" makes n s too and cuts at the end only: nothing depends on a later place.
    """
    window = sizes_per_axis(name, "window", window, x, layout)
    strides = sizes_per_axis(name, "strides", strides, x, layout)
    dilation = sizes_per_axis(name, "dilation", dilation, x, layout)
    extra = sizes_per_axis(name, "output_padding", output_padding, x, layout, least=0)
    spans = tuple((size - 1) * rate + 1 for size, rate in zip(window, dilation, strict=True))
    over = [span - stride for span, stride in zip(spans, strides, strict=True)]  # beyond n s; below 0: short of it
    if padding == "CAUSAL":
        cuts = tuple((0, each) for each in over)
    else:
        half = [(max(0, each) // 2, each - max(0, each) // 2) for each in over]
        cuts = resolve_padding(name, padding, x, half, spans)
    pads = []
    for axis, stride, span, (low, high), more in zip(layout.spatial, strides, spans, cuts, extra, strict=True):
        if (x.shape[axis] - 1) * stride + span - low - high + more < 1:
            raise ValueError(
                f"{name}: the padding {(low, high)} cuts off all of axis {axis} of the output for the input "
                f"{x.shape}; pass less padding."
            )
        pads.append((span - 1 - low, span - 1 - high + more))
    return TransposedWindows(strides, dilation, tuple(pads))
