"""Conv and ConvTranspose, over any number of spatial axes."""

from dataclasses import KW_ONLY
from typing import Any, Literal

import jax
from jax.lax import PrecisionLike

from mlax._jax import named_key
from mlax.core import DType, Initializer, Layer, Size, Zeros, frozen, lecun
from mlax.dtypes import cast
from mlax.ops import (
    Layout,
    Padding,
    PadWith,
    Sizes,
    check_groups,
    check_kernel,
    check_pad,
    conv,
    conv_transpose,
    parse_layout,
    resolve_transposed_windows,
    resolve_windows,
    sizes_per_axis,
)


@frozen
class Conv(Layer):
    """Multiply each window of the spatial axes by a learned kernel and add a learned vector.

    (b, *spatial, c) to (b, *spatial, features), in the dtype of the input; the number of spatial axes is that of
    the input. `window`, `strides` and `dilation` are one number for all spatial axes, or one for each.
    Trainables: kernel (features, *window, c / groups); bias (features,) unless `bias=False`.

    `padding`: "SAME" (at stride 1 the output is as large as the input), "VALID" (none), "CAUSAL" (before only), a
    number of places, or for each spatial axis a number or a pair (before, after); `pad_with` says what it holds.
    `groups`: each group of channels makes its own group of features; "depthwise" is one group for each channel.
    `layout="channel_first"`: (b, c, *spatial), with a kernel (features, c / groups, *window); any other layout is
    spelt, "NHWC/HWIO" say.
    """

    features: Size
    window: Sizes
    _: KW_ONLY
    strides: Sizes = 1
    padding: Padding = "SAME"
    pad_with: PadWith = "zeros"
    dilation: Sizes = 1
    groups: int | Literal["depthwise"] = 1
    layout: str = "channel_last"
    bias: bool = True
    kernel_init: Initializer = lecun()
    bias_init: Initializer = Zeros()
    precision: PrecisionLike = None
    accum_dtype: DType = None  # None: the input's own
    param_dtype: DType = None  # None: the input's own

    def init(self, rng, x):
        axes = parse_layout(f"{self}", self.layout, x)
        where = resolve_windows(f"{self}", x, axes, self.window, self.strides, self.padding, self.dilation)
        check_pad(f"{self}", x.shape, axes.spatial, where.padding, self.pad_with)
        return init_kernel_and_bias(self, rng, x, axes, where.window), None

    def splits(self, number):
        features = self.layout.split("/")[1].index("O") if "/" in self.layout else 0
        return {"kernel": features, "bias": 0}

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y = conv(
            x,
            **cast(trainables, x.dtype),
            strides=self.strides,
            padding=self.padding,
            pad_with=self.pad_with,
            dilation=self.dilation,
            groups=num_groups(self, x),
            layout=self.layout,
            precision=self.precision,
            accum_dtype=self.accum_dtype,
        )
        return y, non_trainables

    def check_variables(self, x, trainables, non_trainables):
        check_channels(self, x, trainables)  # whose words say more than a comparison of shapes
        super().check_variables(x, trainables, non_trainables)


@frozen
class ConvTranspose(Layer):
    """Add up one learned window for each place of the input, `strides` apart, and add a learned vector.

    (b, *spatial, c) to (b, *larger, features), in the dtype of the input. n places, windows that span k places
    and a stride s make (n - 1) s + k - padding + output_padding places: `padding` is how many are cut off, before
    and after, as in PyTorch. "SAME" makes n s places, and is the transpose of a "SAME" convolution; "VALID" cuts
    none; "CAUSAL" makes n s places of which none depends on a later place of the input.
    Trainables: kernel (features, *window, c / groups); bias (features,) unless `bias=False`.

    The kernel has the shape of a `Conv`'s, unlike in PyTorch, whose first axis here counts the inputs. `groups` and
    `layout` are as in `Conv`.
    """

    features: Size
    window: Sizes
    _: KW_ONLY
    strides: Sizes = 1
    padding: Padding = "SAME"
    output_padding: Sizes = 0
    dilation: Sizes = 1
    groups: int | Literal["depthwise"] = 1
    layout: str = "channel_last"
    bias: bool = True
    kernel_init: Initializer = lecun()
    bias_init: Initializer = Zeros()
    precision: PrecisionLike = None
    accum_dtype: DType = None  # None: the input's own
    param_dtype: DType = None  # None: the input's own

    def init(self, rng, x):
        axes = parse_layout(f"{self}", self.layout, x)
        window = sizes_per_axis(f"{self}", "window", self.window, x, axes)
        resolve_transposed_windows(
            f"{self}", x, axes, window, self.strides, self.padding, self.output_padding, self.dilation
        )
        return init_kernel_and_bias(self, rng, x, axes, window), None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y = conv_transpose(
            x,
            **cast(trainables, x.dtype),
            strides=self.strides,
            padding=self.padding,
            output_padding=self.output_padding,
            dilation=self.dilation,
            groups=num_groups(self, x),
            layout=self.layout,
            precision=self.precision,
            accum_dtype=self.accum_dtype,
        )
        return y, non_trainables

    def check_variables(self, x, trainables, non_trainables):
        check_channels(self, x, trainables)  # whose words say more than a comparison of shapes
        super().check_variables(x, trainables, non_trainables)


def init_kernel_and_bias(
    layer: Any, rng: jax.Array, x: Any, axes: Layout, window: tuple[int, ...]
) -> dict[str, jax.Array]:
    """The kernel (outputs, *window, inputs / groups), in the order of the layout, and the bias if there is one."""
    channels, groups = x.shape[axes.channel], num_groups(layer, x)
    check_groups(f"{layer}", groups, channels, layer.features)
    shape = axes.kernel_shape(layer.features, channels // groups, window)
    dtype = layer.param_dtype or x.dtype
    trainables = {
        "kernel": layer.kernel_init(named_key(rng, "kernel"), shape, dtype, in_axis=axes.inputs, out_axis=axes.outputs)
    }
    if layer.bias:
        trainables["bias"] = layer.bias_init(named_key(rng, "bias"), (layer.features,), dtype)
    return trainables


def check_channels(layer: Any, x: Any, trainables: Any) -> None:
    """Refuse a kernel that is not for the channels of `x`, with the layout that it would be for."""
    if isinstance(trainables, dict) and "kernel" in trainables:
        axes = parse_layout(f"{layer}", layer.layout, x)
        check_kernel(f"{layer}", x, trainables["kernel"], axes, num_groups(layer, x))


def num_groups(layer: Any, x: Any) -> int:
    """The number of groups: as it is given, or one for each channel if it is "depthwise"."""
    return x.shape[parse_layout(f"{layer}", layer.layout, x).channel] if layer.groups == "depthwise" else layer.groups
