"""Transposed convolution: the gradient of a convolution by its input."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Float

from mlax._jax import explicit_sharding
from mlax.ops._checks import same_dtype
from mlax.ops._conv import check_kernel, numbers_of, with_bias
from mlax.ops._layout import Layout, layout_of
from mlax.ops._whole_images import over_several_axes, whole_images, with_whole_batches
from mlax.ops._windows import Padding, Sizes, pads_of, per_axis


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
    same_dtype("conv_transpose", x=x, kernel=kernel, bias=bias)
    axes = layout_of("conv_transpose", layout, x)
    check_kernel("conv_transpose", x, kernel, axes, groups)
    window = tuple(kernel.shape[axis] for axis in axes.window)
    where = stamps("conv_transpose", x, axes, window, strides, padding, output_padding, dilation)

    def spread(x: Array, kernel: Array) -> Array:
        return lax.conv_general_dilated(
            x,
            lax.rev(kernel, axes.window),
            (1,) * len(window),
            where.padding,
            lhs_dilation=where.strides,
            rhs_dilation=where.dilation,
            dimension_numbers=numbers_of(axes),
            feature_group_count=groups,
            precision=precision,
            preferred_element_type=accum_dtype,
        )

    apart = max(where.strides, default=1) > 1 and accum_dtype is None and jax.default_backend() == "cpu"
    apart = apart and not (
        groups > 1 and explicit_sharding(x)
    )  # of whose groups JAX would merge the axis with a split one
    way = _with_kernel_gradient(spread) if apart else spread
    way = with_whole_batches(way) if groups > 1 and over_several_axes(x) else way
    y = whole_images(way(whole_images(x, axes), kernel), axes)
    return with_bias(y, bias, axes, x.dtype)


def _with_kernel_gradient(spread: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
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


class Stamps(NamedTuple):
    """Where the windows of a transposed convolution lie, as a convolution of the spread input sees it."""

    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]


def stamps(
    name: str,
    x: Any,
    layout: Layout,
    window: Sizes,
    strides: Sizes,
    padding: Padding,
    output_padding: Sizes,
    dilation: Sizes,
) -> Stamps:
    """Where the windows lie; `name` is who asks, for the errors.

    n places, a stride s and windows that span k places make (n - 1) s + k - cut + output_padding places, as in
    PyTorch. "VALID" cuts nothing. "SAME" makes n s: it is the transpose of the "SAME" convolution of that many.
    "CAUSAL" makes n s too and cuts at the end only: nothing depends on a later place.
    """
    window = per_axis(name, "window", window, x, layout)
    strides = per_axis(name, "strides", strides, x, layout)
    dilation = per_axis(name, "dilation", dilation, x, layout)
    extra = per_axis(name, "output_padding", output_padding, x, layout, least=0)
    spans = tuple((size - 1) * rate + 1 for size, rate in zip(window, dilation, strict=True))
    over = [span - stride for span, stride in zip(spans, strides, strict=True)]  # beyond n s; below 0: short of it
    if padding == "CAUSAL":
        cuts = tuple((0, each) for each in over)
    else:
        half = [(max(0, each) // 2, each - max(0, each) // 2) for each in over]
        cuts = pads_of(name, padding, x, half, spans)
    pads = []
    for axis, stride, span, (low, high), more in zip(layout.spatial, strides, spans, cuts, extra, strict=True):
        if (x.shape[axis] - 1) * stride + span - low - high + more < 1:
            raise ValueError(
                f"{name}: the padding {(low, high)} cuts off all of axis {axis} of the output for the input "
                f"{x.shape}; pass less padding."
            )
        pads.append((span - 1 - low, span - 1 - high + more))
    return Stamps(strides, dilation, tuple(pads))
