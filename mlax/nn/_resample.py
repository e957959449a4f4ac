"""Upsample, PixelShuffle and PixelUnshuffle."""

from dataclasses import KW_ONLY

from mlax import ops
from mlax.core import Layer, frozen
from mlax.ops import Interpolation, Sizes, parse_layout


@frozen
class Upsample(Layer):
    """Upsampling of the spatial axes by `factor`: (b, *spatial, c) to (b, *larger, c), in the dtype of the input.

    `by="nearest"` repeats each position, and "linear" interpolates between two along each axis (bilinear, trilinear).
    With `align_corners=True` the first and the last position stay where they are, else positions are the centers of
    pixels; both as in PyTorch. `factor` is one for all spatial axes or one for each; `layout` is as in `Conv`.

    >>> nn.Upsample(2, by="linear").fwd(jnp.ones((8, 14, 14, 16)), None)[0].shape
    (8, 28, 28, 16)
    """

    factor: Sizes  # of the sizes, along all spatial axes or each
    _: KW_ONLY
    by: Interpolation = "nearest"  # "nearest" or "linear"
    align_corners: bool = False  # whether corners stay where they are
    layout: str = "channel_last"  # "channel_last", "channel_first", or spelled out, like "NHWC"

    def __post_init__(self):
        ops.check_interpolation(f"{self}", self.by, self.align_corners)

    def init(self, rng, x):
        ops.check_floating(f"{self}", x)
        ops.sizes_per_axis(f"{self}", "factor", self.factor, x, parse_layout(f"{self}", self.layout, x))
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y = ops.upsample(x, self.factor, self.by, align_corners=self.align_corners, layout=self.layout)
        return y, non_trainables


@frozen
class PixelShuffle(Layer):
    """Pixel shuffle (depth to space): (b, *spatial, c * prod(factor)) to (b, *spatial * factor, c).

    In the dtype of the input. After a convolution, this is a learned upsampling (sub-pixel convolution). The channels
    of a pixel are in the order (c, *factor), as in PyTorch. `factor` is one for all spatial axes or one for each;
    `layout` is as in `Conv`. https://arxiv.org/abs/1609.05158, equation 4.

    >>> nn.PixelShuffle(2).fwd(jnp.ones((8, 14, 14, 16)), None)[0].shape
    (8, 28, 28, 4)
    """

    factor: Sizes  # of the sizes, along all spatial axes or each
    _: KW_ONLY
    layout: str = "channel_last"  # "channel_last", "channel_first", or spelled out, like "NHWC"

    def init(self, rng, x):
        ops.shuffle_factors(f"{self}", x, parse_layout(f"{self}", self.layout, x), self.factor)
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return ops.pixel_shuffle(x, self.factor, layout=self.layout), non_trainables


@frozen
class PixelUnshuffle(Layer):
    """Pixel unshuffle (space to depth): rearrange pixels into channels, the inverse of `PixelShuffle`.

    (b, *spatial, c) to (b, *spatial / factor, c * prod(factor)), in the dtype of the input.

    >>> nn.PixelUnshuffle(2).fwd(jnp.ones((8, 28, 28, 4)), None)[0].shape
    (8, 14, 14, 16)
    """

    factor: Sizes  # of the sizes, along all spatial axes or each
    _: KW_ONLY
    layout: str = "channel_last"  # "channel_last", "channel_first", or spelled out, like "NHWC"

    def init(self, rng, x):
        ops.unshuffle_factors(f"{self}", x, parse_layout(f"{self}", self.layout, x), self.factor)
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return ops.pixel_unshuffle(x, self.factor, layout=self.layout), non_trainables
