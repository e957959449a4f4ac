"""Conv: a learned convolution over any number of spatial axes."""

from dataclasses import KW_ONLY
from typing import Literal

from jax.lax import PrecisionLike

from mlax.core import DType, Initializer, Layer, Size, Zeros, frozen, lecun
from mlax.dtypes import cast
from mlax.nn._kernel import check_channels, groups_of, kernel_and_bias
from mlax.ops import Padding, PadWith, Sizes, check_pad, conv, layout_of, windows


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
        axes = layout_of(f"{self}", self.layout, x)
        where = windows(f"{self}", x, axes, self.window, self.strides, self.padding, self.dilation)
        check_pad(f"{self}", x.shape, axes.spatial, where.padding, self.pad_with)
        return kernel_and_bias(self, rng, x, axes, where.window), None

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
            groups=groups_of(self, x),
            layout=self.layout,
            precision=self.precision,
            accum_dtype=self.accum_dtype,
        )
        return y, non_trainables

    def check_variables(self, x, trainables, non_trainables):
        check_channels(self, x, trainables)  # whose words say more than a comparison of shapes
        super().check_variables(x, trainables, non_trainables)
