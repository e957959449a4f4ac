"""Convolution and transposed convolution over any number of spatial axes."""

from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from mlax._jax import WORKAROUND, broadcast_like, with_jvps
from mlax.core import check_is_dtype
from mlax.ops._checks import check_kernel, check_same_dtype
from mlax.ops._cpu import (
    Convolve,
    canonical_conv,
    depthwise_products,
    prefers_canonical_conv,
    prefers_depthwise_products,
    prefers_undilated_kernel_grad,
    with_undilated_kernel_grad,
)
from mlax.ops._image_forms import fold_strides, prefers_folded_strides
from mlax.ops._layout import Layout, parse_layout
from mlax.ops._windows import Padding, PadWith, Sizes, pad, resolve_transposed_windows, resolve_windows


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
    """Convolution: the sum of each window of `x` times `kernel` (not flipped), plus `bias`, in the dtype of `x`.

    (b, *spatial, c) and (f, *window, c / groups) to (b, *spatial, f), or as in `layout`. Each group of channels
    gives its own f / groups features. Products are summed in `accum_dtype` if given.
    """
    check_is_dtype("conv", accum_dtype=accum_dtype)
    axes, window = _check("conv", x, kernel, bias, layout, groups)
    windows = resolve_windows("conv", x, axes, window, strides, padding, dilation)
    if pad_with != "zeros":
        x = pad(x, axes.spatial, windows.padding, pad_with)
        windows = windows._replace(padding=((0, 0),) * len(window))

    if prefers_folded_strides(x, axes, windows, groups):
        x, kernel, windows = fold_strides(x, kernel, windows)

    def convolve(x: Array, kernel: Array) -> Array:
        return lax.conv_general_dilated(
            x,
            kernel,
            windows.strides,
            windows.padding,
            rhs_dilation=windows.dilation,
            dimension_numbers=dimension_numbers(axes),
            feature_group_count=groups,
            precision=precision,
            preferred_element_type=accum_dtype,
        )

    if prefers_depthwise_products(x, kernel, axes, groups, accum_dtype):
        y = depthwise_products(x, kernel, axes, windows, accum_dtype)
    elif prefers_canonical_conv(x, axes, groups, accum_dtype):
        y = canonical_conv(axes, windows, precision)(x, kernel)
    else:
        y = _convolve_unsharded(convolve, x, kernel, axes, groups)
    return _add_bias(y, bias, axes, x.dtype)


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
    """Transposed convolution: the sum of one window for each position of `x`, its values times `kernel`, plus `bias`,
    in the dtype of `x`.

    (b, *spatial, c) and (f, *window, c / groups) to (b, *larger, f), or as in `layout`. Neighboring windows are
    `strides` apart, and `padding` is cropped from both ends: n positions, windows that span k positions and a stride s
    give (n - 1) s + k - padding + output_padding positions, as in PyTorch. "SAME" and "CAUSAL" give n s.
    """
    check_is_dtype("conv_transpose", accum_dtype=accum_dtype)
    axes, window = _check("conv_transpose", x, kernel, bias, layout, groups)
    windows = resolve_transposed_windows("conv_transpose", x, axes, window, strides, padding, output_padding, dilation)

    def convolve(x: Array, kernel: Array) -> Array:
        return lax.conv_general_dilated(
            x,
            lax.rev(kernel, axes.window),
            (1,) * len(window),
            windows.padding,
            lhs_dilation=windows.strides,
            rhs_dilation=windows.dilation,
            dimension_numbers=dimension_numbers(axes),
            feature_group_count=groups,
            precision=precision,
            preferred_element_type=accum_dtype,
        )

    undilated = prefers_undilated_kernel_grad(x, windows.strides, groups, accum_dtype)
    form = with_undilated_kernel_grad(convolve) if undilated else convolve
    return _add_bias(_convolve_unsharded(form, x, kernel, axes, groups), bias, axes, x.dtype)


def dimension_numbers(axes: Layout) -> lax.ConvDimensionNumbers:
    """The layout as `lax.conv_general_dilated` takes it."""
    image = (axes.batch, axes.channel, *axes.spatial)
    return lax.ConvDimensionNumbers(image, (axes.outputs, axes.inputs, *axes.window), image)


def _check(
    name: str, x: Array, kernel: Array, bias: Array | None, layout: str, groups: int
) -> tuple[Layout, tuple[int, ...]]:
    """The layout and the window of valid arguments."""
    check_same_dtype(name, x=x, kernel=kernel, bias=bias)
    axes = parse_layout(name, layout, x)
    check_kernel(name, x, kernel, axes, groups)
    return axes, tuple(kernel.shape[axis] for axis in axes.window)


def _add_bias(y: Array, bias: Array | None, axes: Layout, dtype: Any) -> Array:
    if bias is not None:
        bias = lax.expand_dims(lax.convert_element_type(bias, y.dtype), axes.non_channel_axes())
        y = y + broadcast_like(bias, y)
    return lax.convert_element_type(y, dtype)


def _convolve_unsharded(convolve: Convolve, x: Array, kernel: Array, axes: Layout, groups: int) -> Array:
    """`convolve(x, kernel)` with the spatial axes of its input and output unsharded, where XLA may shard them.

    A workaround: XLA's gradients of convolutions over sharded images are wrong, without an error, on CPUs with JAX
    0.10.2 to 0.12 (tests/nn/test_conv_spmd.py).
    """
    mesh = jax.typeof(x).sharding.mesh
    if not mesh.auto_axes:
        return convolve(x, kernel)
    if groups > 1 and sum(mesh.shape[name] > 1 for name in mesh.auto_axes) > 1:
        convolve = _with_unsharded_kernel_grad(convolve)
    return _unshard(convolve(_unshard(x, axes.spatial), kernel), axes.spatial)


def _with_unsharded_kernel_grad(convolve: Convolve) -> Convolve:
    """`convolve`, whose derivative by the kernel has both its operands unsharded.

    Sharded over one axis of a mesh of several, the gradient of a grouped kernel is summed over the others too.
    """

    def x_jvp(dot: Array, x: Array, kernel: Array) -> Array:
        return unsharded(dot, kernel)

    def kernel_jvp(dot: Array, x: Array, kernel: Array) -> Array:
        y = unsharded(_unshard(x, range(x.ndim)), dot)
        return _unshard(y, range(y.ndim))

    unsharded = with_jvps(convolve, x_jvp, kernel_jvp)
    return unsharded


def _unshard(x: Array, axes: Any) -> Array:
    """`x` with these axes unsharded on its own mesh, which need not be the one in context; XLA shards the others."""
    spec = [None if axis in axes else PartitionSpec.UNCONSTRAINED for axis in range(x.ndim)]
    with jax.named_scope(WORKAROUND):
        return lax.with_sharding_constraint(x, NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec)))
