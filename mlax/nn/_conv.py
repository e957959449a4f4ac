"""Conv and ConvTranspose, over any number of spatial axes."""

from dataclasses import KW_ONLY
from typing import Any, Literal

import jax
from jax.lax import PrecisionLike

from mlax import ops
from mlax._jax import named_key
from mlax.core import DType, Initializer, Layer, Size, Tree, Zeros, frozen, lecun
from mlax.dtypes import cast
from mlax.ops import Layout, Padding, PadWith, Sizes, parse_layout


@frozen
class Convolution(Layer):
    """The fields and variables that Conv and ConvTranspose share."""

    features: Size  # the channels of the output
    window: Sizes  # the size of a window, along all spatial axes or each
    _: KW_ONLY
    strides: Sizes = 1  # the distance of windows
    padding: Padding = "SAME"  # "SAME", "VALID", "CAUSAL", a size, or sizes by axis
    dilation: Sizes = 1  # the distance of elements in a window
    groups: int | Literal["depthwise"] = 1  # of channels, each convolved by itself, or "depthwise"
    layout: str = "channel_last"  # "channel_last", "channel_first", or spelled out, like "NHWC"
    bias: bool = True  # whether to add a bias
    kernel_init: Initializer = lecun()  # of the kernel
    bias_init: Initializer = Zeros()  # of the bias
    precision: PrecisionLike = None  # of the products, as in jax.lax
    accum_dtype: DType = None  # None: the input's
    param_dtype: DType = None  # None: the input's

    @property
    def kernel_output_axis(self) -> int:
        """The axis of the kernel that counts the features."""
        return ops.kernel_output_axis(self.layout)

    def tensor_parallel_axes(self, number):
        return {"kernel": self.kernel_output_axis, "bias": 0}

    def check_variables(self, x: Any, trainables: Tree, non_trainables: Tree) -> None:
        if isinstance(trainables, dict) and "kernel" in trainables:  # a better message than a comparison of shapes
            axes = parse_layout(f"{self}", self.layout, x)
            ops.check_kernel(f"{self}", x, trainables["kernel"], axes, self._num_groups(x))
        super().check_variables(x, trainables, non_trainables)

    def _init_variables(self, rng: jax.Array, x: Any, axes: Layout, window: tuple[int, ...]) -> dict[str, jax.Array]:
        """The kernel (outputs, *window, inputs / groups), in the order of the layout, and the bias if there is one."""
        channels, groups, dtype = x.shape[axes.channel], self._num_groups(x), self.param_dtype or x.dtype
        ops.check_groups(f"{self}", groups, channels, self.features)
        shape = axes.kernel_shape(self.features, channels // groups, window)
        kernel = self.kernel_init(named_key(rng, "kernel"), shape, dtype, in_axis=axes.inputs, out_axis=axes.outputs)
        if not self.bias:
            return {"kernel": kernel}
        return {"kernel": kernel, "bias": self.bias_init(named_key(rng, "bias"), (self.features,), dtype)}

    def _num_groups(self, x: Any) -> int:
        return x.shape[parse_layout(f"{self}", self.layout, x).channel] if self.groups == "depthwise" else self.groups


@frozen
class Conv(Convolution):
    """Convolution over the spatial axes with a learned kernel, plus a learned bias.

    (b, *spatial, c) to (b, *spatial, features), in the dtype of the input, with as many spatial axes as the input has.
    `window`, `strides` and `dilation` are one size for all spatial axes, or one for each.
    Trainables: kernel (features, *window, c / groups); bias (features,) unless `bias=False`.

    `padding`: "SAME" (at stride 1 the output is as large as the input), "VALID" (none), "CAUSAL" (before only), a
    size, or for each spatial axis a size or a pair (before, after); `pad_with` says what it holds.
    `groups`: each group of channels gives its own group of features; "depthwise" is one group for each channel.
    `layout="channel_first"`: (b, c, *spatial), with a kernel (features, c / groups, *window); any other layout is
    spelled out, like "NHWC/HWIO".

    >>> layer, x = nn.Conv(16, 3, strides=2), jnp.ones((8, 32, 32, 3))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 16, 16, 16)
    """

    _: KW_ONLY
    pad_with: PadWith = "zeros"  # "zeros", "circular", "reflect" or "edge"

    def init(self, rng, x):
        axes = parse_layout(f"{self}", self.layout, x)
        windows = ops.resolve_windows(f"{self}", x, axes, self.window, self.strides, self.padding, self.dilation)
        ops.check_pad(f"{self}", x.shape, axes.spatial, windows.padding, self.pad_with)
        return self._init_variables(rng, x, axes, windows.window), None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y = ops.conv(
            x,
            **cast(trainables, x.dtype),
            strides=self.strides,
            padding=self.padding,
            pad_with=self.pad_with,
            dilation=self.dilation,
            groups=self._num_groups(x),
            layout=self.layout,
            precision=self.precision,
            accum_dtype=self.accum_dtype,
        )
        return y, non_trainables


@frozen
class ConvTranspose(Convolution):
    """Transposed convolution: the sum of one learned window for each position of the input, plus a learned bias.

    (b, *spatial, c) to (b, *larger, features), in the dtype of the input. n positions, windows that span k positions
    and a stride s give (n - 1) s + k - padding + output_padding positions: `padding` is how many are cropped, before
    and after, as in PyTorch. "SAME" gives n s positions, and is the transpose of a "SAME" convolution; "VALID" crops
    none; "CAUSAL" gives n s positions of which none depends on a later position of the input.
    Trainables: kernel (features, *window, c / groups); bias (features,) unless `bias=False`.

    The kernel has the shape of a `Conv`'s; PyTorch's has the inputs on its first axis. `groups` and `layout` are as in
    `Conv`.

    >>> layer, x = nn.ConvTranspose(3, 4, strides=2), jnp.ones((8, 16, 16, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 32, 32, 3)
    """

    _: KW_ONLY
    output_padding: Sizes = 0  # added to one side of the output

    def init(self, rng, x):
        axes = parse_layout(f"{self}", self.layout, x)
        window = ops.sizes_per_axis(f"{self}", "window", self.window, x, axes)
        ops.resolve_transposed_windows(
            f"{self}", x, axes, window, self.strides, self.padding, self.output_padding, self.dilation
        )
        return self._init_variables(rng, x, axes, window), None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y = ops.conv_transpose(
            x,
            **cast(trainables, x.dtype),
            strides=self.strides,
            padding=self.padding,
            output_padding=self.output_padding,
            dilation=self.dilation,
            groups=self._num_groups(x),
            layout=self.layout,
            precision=self.precision,
            accum_dtype=self.accum_dtype,
        )
        return y, non_trainables
