"""Convolution over any number of spatial axes."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlax.ops._checks import same_dtype
from mlax.ops._conv_chunked import by_chunks, with_chunks
from mlax.ops._layout import Layout, layout_of
from mlax.ops._pad import PadWith, pad
from mlax.ops._whole_images import over_several_axes, whole_images, with_whole_batches
from mlax.ops._windows import Padding, Sizes, Windows, all_places, windows

MANY = 64  # places of a window that are too many to be added up one by one


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
    same_dtype("conv", x=x, kernel=kernel, bias=bias)
    axes = layout_of("conv", layout, x)
    check_kernel("conv", x, kernel, axes, groups)
    window = tuple(kernel.shape[axis] for axis in axes.window)
    where = windows("conv", x, axes, window, strides, padding, dilation)
    pads = where.padding
    if pad_with != "zeros":
        x, pads = pad(x, axes.spatial, pads, pad_with), ((0, 0),) * len(pads)
    if _by_places(x, kernel, axes, groups, accum_dtype):
        y = _depthwise(x, kernel, axes, where._replace(padding=pads), accum_dtype)
    else:

        def convolve(x: Array, kernel: Array) -> Array:
            return lax.conv_general_dilated(
                x,
                kernel,
                where.strides,
                pads,
                rhs_dilation=where.dilation,
                dimension_numbers=numbers_of(axes),
                feature_group_count=groups,
                precision=precision,
                preferred_element_type=accum_dtype,
            )

        chunks = by_chunks(x, axes, groups, accum_dtype)
        way = with_chunks(convolve, axes, where._replace(padding=pads), precision) if chunks else convolve
        way = with_whole_batches(way) if groups > 1 and over_several_axes(x) else way
        y = whole_images(way(whole_images(x, axes), kernel), axes)
    return with_bias(y, bias, axes, x.dtype)


def _by_places(x: Array, kernel: Array, axes: Layout, groups: int, accum_dtype: Any) -> bool:
    """Whether to add up products of whole arrays, one for each place of the window: for depthwise kernels on a CPU.

    XLA's CPU compiler has no fast loop for them (benchmarks/layers.py). In a narrow dtype each sum would be rounded,
    and large windows would make large programs.
    """
    return (
        jax.default_backend() == "cpu"
        and groups == x.shape[axes.channel] == kernel.shape[axes.outputs]
        and math.prod(kernel.shape) <= MANY * groups
        and jnp.finfo(accum_dtype or x.dtype).bits >= 32
    )


def _depthwise(x: Array, kernel: Array, axes: Layout, where: Windows, accum_dtype: Any) -> Array:
    wide, weights = (lax.convert_element_type(each, accum_dtype or x.dtype) for each in (x, kernel))
    weights = lax.transpose(weights, (*axes.window, axes.outputs, axes.inputs)).reshape(-1, kernel.shape[axes.outputs])
    pieces = all_places(pad(wide, axes.spatial, where.padding, "zeros"), axes, where)
    others = tuple(axis for axis in range(x.ndim) if axis != axes.channel)
    products = [piece * lax.expand_dims(weight, others) for piece, weight in zip(pieces, weights, strict=True)]
    return functools.reduce(lax.add, products)


def numbers_of(axes: Layout) -> lax.ConvDimensionNumbers:
    """The same axes in JAX's own words."""
    image = (axes.batch, axes.channel, *axes.spatial)
    return lax.ConvDimensionNumbers(image, (axes.outputs, axes.inputs, *axes.window), image)


def with_bias(y: Float[Array, "..."], bias: Float[Array, " f"] | None, axes: Layout, dtype: Any) -> Float[Array, "..."]:
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
            f"{axes.channel} of the input.{_other_layout(x.shape, kernel.shape[axes.inputs] * groups, axes.channel)}"
        )
    check_groups(name, groups, x.shape[axes.channel], kernel.shape[axes.outputs])


def _other_layout(shape: tuple[int, ...], channels: int, axis: int) -> str:
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
