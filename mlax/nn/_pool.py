"""MaxPool, MeanPool, SumPool and Pool over windows; GlobalPool and AdaptivePool over all positions and over bins."""

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any, ClassVar

from jax import lax

from mlax import ops
from mlax.core import DType, Layer, frozen
from mlax.ops import Padding, Reduction, Sizes, parse_layout


@frozen
class _WindowPool(Layer):
    """The fields that MaxPool, MeanPool and SumPool share."""

    window: Sizes  # the size of a window, along all spatial axes or each
    _: KW_ONLY
    strides: Sizes | None = None  # None: the window's size
    padding: Padding = "VALID"  # "SAME", "VALID", "CAUSAL", a size, or sizes by axis
    dilation: Sizes = 1  # the distance of elements in a window
    ceil: bool = False  # whether a last, incomplete window counts
    layout: str = "channel_last"  # "channel_last", "channel_first", or spelled out, like "NHWC"

    def init(self, rng, x):
        ops.resolve_pool_windows(f"{self}", x, **_window_fields(self))
        return None, None


@frozen
class MaxPool(_WindowPool):
    """Max pooling over windows: (b, *spatial, c) to (b, *windows, c), in the dtype of the input.

    `strides` are the window's sizes unless given; `padding`, `dilation` and `layout` are as in `Conv`; `ceil=True` lets
    the last window extend beyond the end of the input, if it starts before it. A window of nothing but padding is an
    error. The gradient goes to the first of equal elements, in row-major order, as in PyTorch. NaN is the maximum.

    >>> nn.MaxPool(2).fwd(jnp.ones((8, 28, 28, 16)), None)[0].shape
    (8, 14, 14, 16)
    """

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return ops.max_pool(x, **_window_fields(self)), non_trainables


@frozen
class SumPool(_WindowPool):
    """Sum pooling over windows: (b, *spatial, c) to (b, *windows, c), in the dtype of the input.

    `strides`, `padding`, `dilation`, `ceil` and `layout` are as in `MaxPool`.

    >>> nn.SumPool(2).fwd(jnp.ones((8, 28, 28, 16)), None)[0].shape
    (8, 14, 14, 16)
    """

    has_statistics: ClassVar[bool] = True

    _: KW_ONLY
    accum_dtype: DType = None  # None: the input's

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return ops.pool(x, lax.add, 0.0, accum_dtype=self.accum_dtype, **_window_fields(self)), non_trainables


@frozen
class MeanPool(_WindowPool):
    """Average pooling over windows: (b, *spatial, c) to (b, *windows, c), in the dtype of the input.

    The mean is over the elements of the input, or over the padding too with `count_padding=True`, as is PyTorch's
    default. Positions beyond the padding (by `ceil`) never count. `strides`, `padding`, `dilation`, `ceil` and `layout`
    are as in `MaxPool`.

    >>> nn.MeanPool(3, strides=2, padding="SAME").fwd(jnp.ones((8, 28, 28, 16)), None)[0].shape
    (8, 14, 14, 16)
    """

    has_statistics: ClassVar[bool] = True

    _: KW_ONLY
    count_padding: bool = False  # whether padding counts in the mean
    accum_dtype: DType = None  # None: the input's

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y = ops.mean_pool(x, count_padding=self.count_padding, accum_dtype=self.accum_dtype, **_window_fields(self))
        return y, non_trainables


@frozen
class Pool(Layer):
    """Pooling over windows by any associative function, in order: `Pool(jnp.logaddexp, -math.inf, 2)`.

    `combine(a, b)` is elementwise on whole arrays, and `start` is its identity, `combine(start, a) == a`; the padding
    holds it. (b, *spatial, c) to (b, *windows, c), in the dtype of the input. `strides`, `padding`, `dilation`, `ceil`
    and `layout` are as in `MaxPool`.

    >>> nn.Pool(jnp.minimum, math.inf, 2).fwd(jnp.ones((8, 28, 28, 16)), None)[0].shape
    (8, 14, 14, 16)
    """

    combine: Callable[[Any, Any], Any]  # an associative function of two arrays, jnp.maximum say
    start: float  # its neutral element
    window: Sizes  # the size of a window, along all spatial axes or each
    _: KW_ONLY
    strides: Sizes | None = None  # None: the window's size
    padding: Padding = "VALID"  # "SAME", "VALID", "CAUSAL", a size, or sizes by axis
    dilation: Sizes = 1  # the distance of elements in a window
    ceil: bool = False  # whether a last, incomplete window counts
    layout: str = "channel_last"  # "channel_last", "channel_first", or spelled out, like "NHWC"

    def init(self, rng, x):
        ops.resolve_pool_windows(f"{self}", x, **_window_fields(self))
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return ops.pool(x, self.combine, self.start, **_window_fields(self)), non_trainables


@frozen
class GlobalPool(Layer):
    """Global pooling, the mean, maximum or sum over all positions: (b, *spatial, c) to (b, c), in the input's dtype.

    With `keep_axes=True` the spatial axes remain, of size 1. The gradient of the maximum goes to the first of equals.

    >>> nn.GlobalPool().fwd(jnp.ones((8, 7, 7, 64)), None)[0].shape
    (8, 64)
    """

    has_statistics: ClassVar[bool] = True

    _: KW_ONLY
    by: Reduction = "mean"  # "mean", "max" or "sum"
    keep_axes: bool = False  # whether spatial axes of size 1 remain
    layout: str = "channel_last"  # "channel_last", "channel_first", or spelled out, like "NHWC"
    accum_dtype: DType = None  # None: the input's

    def __post_init__(self):
        ops.check_reduction(f"{self}", self.by)

    def init(self, rng, x):
        ops.check_floating(f"{self}", x)
        parse_layout(f"{self}", self.layout, x)
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y = ops.global_pool(x, self.by, keep_axes=self.keep_axes, layout=self.layout, accum_dtype=self.accum_dtype)
        return y, non_trainables


@frozen
class AdaptivePool(Layer):
    """Adaptive pooling, the mean, maximum or sum of each of `size` bins: (b, *spatial, c) to (b, *size, c).

    In the dtype of the input. `size` is one for all spatial axes or one for each, None for an axis to leave as it is.
    Bin i of m over n positions is PyTorch's, from floor(i n / m) up to ceil((i + 1) n / m): bins overlap where m does
    not divide n.

    >>> nn.AdaptivePool(4).fwd(jnp.ones((8, 30, 30, 64)), None)[0].shape
    (8, 4, 4, 64)
    """

    has_statistics: ClassVar[bool] = True

    size: int | tuple[int | None, ...]  # of the output, along all spatial axes or each; None: unchanged
    _: KW_ONLY
    by: Reduction = "mean"  # "mean", "max" or "sum"
    layout: str = "channel_last"  # "channel_last", "channel_first", or spelled out, like "NHWC"
    accum_dtype: DType = None  # None: the input's

    def __post_init__(self):
        ops.check_reduction(f"{self}", self.by)

    def init(self, rng, x):
        ops.check_floating(f"{self}", x)
        ops.adaptive_sizes(f"{self}", self.size, x, parse_layout(f"{self}", self.layout, x))
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y = ops.adaptive_pool(x, self.size, self.by, layout=self.layout, accum_dtype=self.accum_dtype)
        return y, non_trainables


def _window_fields(layer: Any) -> dict[str, Any]:
    """The fields that all pooling over windows has, as `ops` takes them."""
    return {name: getattr(layer, name) for name in ("window", "strides", "padding", "dilation", "ceil", "layout")}
