"""ConvTranspose: a learned transposed convolution, which makes the spatial axes larger."""

from dataclasses import KW_ONLY
from typing import Literal

from jax.lax import PrecisionLike

from mlax.core import DType, Initializer, Layer, Size, Zeros, frozen, lecun
from mlax.dtypes import cast
from mlax.nn._kernel import check_channels, groups_of, kernel_and_bias
from mlax.ops import Padding, Sizes, conv_transpose, layout_of, per_axis, stamps


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
        axes = layout_of(f"{self}", self.layout, x)
        window = per_axis(f"{self}", "window", self.window, x, axes)
        stamps(f"{self}", x, axes, window, self.strides, self.padding, self.output_padding, self.dilation)
        return kernel_and_bias(self, rng, x, axes, window), None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y = conv_transpose(
            x,
            **cast(trainables, x.dtype),
            strides=self.strides,
            padding=self.padding,
            output_padding=self.output_padding,
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
