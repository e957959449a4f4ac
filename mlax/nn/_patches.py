"""Patches: each window of the spatial axes as features."""

from dataclasses import KW_ONLY

from mlax.core import Layer, frozen
from mlax.ops import Padding, Sizes, layout_of, patches, windows


@frozen
class Patches(Layer):
    """Copy the elements of each window into one vector of features.

    (b, *spatial, c) to (b, *windows, window * c), in the dtype of the input. Windows lie side by side unless
    `strides` says otherwise. The features are in the order of the axes of a `Conv`'s kernel in the same layout, so
    that a `Linear` on patches is that `Conv`, its kernel flattened. `padding`, `dilation`, `layout`: as in `Conv`.
    """

    window: Sizes
    _: KW_ONLY
    strides: Sizes | None = None  # None: the window's size
    padding: Padding = "VALID"
    dilation: Sizes = 1
    layout: str = "channel_last"

    def init(self, rng, x):
        axes = layout_of(f"{self}", self.layout, x)
        strides = self.window if self.strides is None else self.strides
        windows(f"{self}", x, axes, self.window, strides, self.padding, self.dilation)
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y = patches(
            x,
            self.window,
            strides=self.strides,
            padding=self.padding,
            dilation=self.dilation,
            layout=self.layout,
        )
        return y, non_trainables
