"""Flatten, Reshape and Patches."""

import math
from dataclasses import KW_ONLY
from typing import ClassVar

from mlax import ops
from mlax._jax import explicit_sharding
from mlax.core import Layer, frozen
from mlax.ops import Padding, Sizes, parse_layout


@frozen
class Flatten(Layer):
    """Flatten all axes after the batch axis into one: (b, ...) to (b, n), in the dtype of the input.

    >>> nn.Flatten().fwd(jnp.ones((8, 7, 7, 64)), None)[0].shape
    (8, 3136)
    """

    def init(self, rng, x):
        if x.ndim == 0:
            raise ValueError(f"{self}: the input is a scalar but needs a batch axis; reshape it to (1,).")
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        # fused with a flat consumer, the input would be computed over one axis, which takes up to three times as long
        return ops.materialize(x).reshape(x.shape[0], math.prod(x.shape[1:])), non_trainables


@frozen
class Reshape(Layer):
    """Reshape each example: (b, ...) to (b, *shape), in the dtype of the input.

    One size of `shape` may be -1, to be inferred.

    >>> nn.Reshape((7, 7, -1)).fwd(jnp.ones((8, 3136)), None)[0].shape
    (8, 7, 7, 64)
    """

    shape: tuple[int, ...]  # of the output without the batch axis; -1: what is left

    def __post_init__(self):
        if not isinstance(self.shape, tuple) or not all(isinstance(size, int) for size in self.shape):
            raise TypeError(f"Reshape: shape is {self.shape!r}, but must be a tuple of integers.")
        if min(self.shape, default=0) < -1 or self.shape.count(-1) > 1:
            raise ValueError(
                f"Reshape: shape is {self.shape}, but must be sizes of at least 0, at most one of them inferred (-1)."
            )

    def init(self, rng, x):
        if x.ndim == 0:
            raise ValueError(f"{self}: the input is a scalar but needs a batch axis; reshape it to (1,).")
        self._infer_sizes(x.shape[1:])
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        shape = (x.shape[0], *self._infer_sizes(x.shape[1:]))
        return x.reshape(shape, out_sharding=explicit_sharding(x, (0,))), non_trainables

    def _infer_sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        size, known = math.prod(shape), math.prod(size for size in self.shape if size != -1)
        if -1 not in self.shape:
            fits, rest = size == known, 0
        else:
            fits, rest = (size % known == 0, size // known) if known else (False, 0)
        if not fits:
            raise ValueError(
                f"{self}: each example has the shape {shape}, which is {size} elements, and cannot be reshaped to "
                f"{self.shape}; pass sizes with that product."
            )
        return tuple(rest if size == -1 else size for size in self.shape)


@frozen
class Patches(Layer):
    """Patch extraction (im2col), as in a vision transformer: the elements of each window as one vector of features.

    (b, *spatial, c) to (b, *windows, window * c), in the dtype of the input. `strides` are the window's sizes unless
    given. The features are in the order of the axes of a `Conv`'s kernel in the same layout, so that a `Linear` on
    patches is that `Conv`, with its kernel flattened. `padding`, `dilation` and `layout` are as in `Conv`.

    >>> nn.Patches(4).fwd(jnp.ones((8, 32, 32, 3)), None)[0].shape
    (8, 8, 8, 48)
    """

    needs_floating_input: ClassVar[bool] = True

    window: Sizes  # the size of a window, along all spatial axes or each
    _: KW_ONLY
    strides: Sizes | None = None  # None: the window's size
    padding: Padding = "VALID"  # "SAME", "VALID", "CAUSAL", a size, or sizes by axis
    dilation: Sizes = 1  # the distance of elements in a window
    layout: str = "channel_last"  # "channel_last", "channel_first", or spelled out, like "NHWC"

    def init(self, rng, x):
        axes = parse_layout(f"{self}", self.layout, x)
        strides = self.window if self.strides is None else self.strides
        ops.resolve_windows(f"{self}", x, axes, self.window, strides, self.padding, self.dilation)
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y = ops.patches(
            x,
            self.window,
            strides=self.strides,
            padding=self.padding,
            dilation=self.dilation,
            layout=self.layout,
        )
        return y, non_trainables
