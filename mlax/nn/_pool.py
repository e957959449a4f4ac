"""Pool, MaxPool, MeanPool and SumPool: each window of the spatial axes, reduced to one number.

In all of them (b, *spatial, c) becomes (b, *windows, c), in the dtype of the input. Windows lie side by side unless
`strides` says otherwise; `padding`, `dilation` and `layout` are as in `Conv`; `ceil=True` lets the last window hang
over the end of the input, if it starts before it. A window of nothing but padding is refused.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any, ClassVar

from jax import lax

from mlax.core import DType, Layer, frozen
from mlax.ops import (
    Padding,
    Reduction,
    Sizes,
    adaptive_pool,
    adaptive_sizes,
    check_reduction,
    global_pool,
    maximum,
    mean_pool,
    parse_layout,
    pool,
    resolve_pool_windows,
)


@frozen
class Pool(Layer):
    """Combine the elements of each window, in order, by any associative function: `Pool(jnp.logaddexp, -math.inf, 2)`.

    `combine(a, b)` works on whole arrays, element by element, and `start` changes nothing: `combine(start, a)` is
    `a`. The padding holds it. (b, *spatial, c) to (b, *windows, c), in the dtype of the input.
    """

    combine: Callable[[Any, Any], Any]
    start: float
    window: Sizes
    _: KW_ONLY
    strides: Sizes | None = None  # None: the window's size
    padding: Padding = "VALID"
    dilation: Sizes = 1
    ceil: bool = False
    layout: str = "channel_last"

    def init(self, rng, x):
        return _check_windows(self, x)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return pool(x, self.combine, self.start, **_window_fields(self)), non_trainables


@frozen
class MaxPool(Layer):
    """Take the largest element of each window: (b, *spatial, c) to (b, *windows, c), in the dtype of the input.

    The gradient goes to the first of equal elements, in row-major order, as in PyTorch. NaN counts as the largest.
    """

    window: Sizes
    _: KW_ONLY
    strides: Sizes | None = None  # None: the window's size
    padding: Padding = "VALID"
    dilation: Sizes = 1
    ceil: bool = False
    layout: str = "channel_last"

    def init(self, rng, x):
        return _check_windows(self, x)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return pool(x, maximum, -math.inf, **_window_fields(self)), non_trainables


@frozen
class SumPool(Layer):
    """Add up the elements of each window: (b, *spatial, c) to (b, *windows, c), in the dtype of the input."""

    takes_statistics: ClassVar[bool] = True

    window: Sizes
    _: KW_ONLY
    strides: Sizes | None = None  # None: the window's size
    padding: Padding = "VALID"
    dilation: Sizes = 1
    ceil: bool = False
    layout: str = "channel_last"
    accum_dtype: DType = None  # None: the input's own

    def init(self, rng, x):
        return _check_windows(self, x)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return pool(x, lax.add, 0.0, accum_dtype=self.accum_dtype, **_window_fields(self)), non_trainables


@frozen
class MeanPool(Layer):
    """Take the mean of each window: (b, *spatial, c) to (b, *windows, c), in the dtype of the input.

    The mean is over the elements of the input, or over the padding too with `count_padding=True`, as is PyTorch's
    default. What hangs over the padding (by `ceil`) never counts.
    """

    takes_statistics: ClassVar[bool] = True

    window: Sizes
    _: KW_ONLY
    strides: Sizes | None = None  # None: the window's size
    padding: Padding = "VALID"
    dilation: Sizes = 1
    ceil: bool = False
    count_padding: bool = False
    layout: str = "channel_last"
    accum_dtype: DType = None  # None: the input's own

    def init(self, rng, x):
        return _check_windows(self, x)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y = mean_pool(x, count_padding=self.count_padding, accum_dtype=self.accum_dtype, **_window_fields(self))
        return y, non_trainables


def _window_fields(layer: Any) -> dict[str, Any]:
    """The fields that all of them have, as `ops` takes them."""
    return {name: getattr(layer, name) for name in ("window", "strides", "padding", "dilation", "ceil", "layout")}


def _check_windows(layer: Any, x: Any) -> tuple[None, None]:
    """No variables, once the windows are known to fit the input."""
    resolve_pool_windows(f"{layer}", x, **_window_fields(layer))
    return None, None


@frozen
class GlobalPool(Layer):
    """Take the mean, the largest or the sum of all places: (b, *spatial, c) to (b, c), in the dtype of the input.

    With `keep_axes=True` the spatial axes stay, of size 1. The gradient of the largest goes to the first of equals.
    """

    takes_statistics: ClassVar[bool] = True

    _: KW_ONLY
    by: Reduction = "mean"
    keep_axes: bool = False
    layout: str = "channel_last"
    accum_dtype: DType = None  # None: the input's own

    def __post_init__(self):
        check_reduction(f"{self}", self.by)

    def init(self, rng, x):
        parse_layout(f"{self}", self.layout, x)
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y = global_pool(x, self.by, keep_axes=self.keep_axes, layout=self.layout, accum_dtype=self.accum_dtype)
        return y, non_trainables


@frozen
class AdaptivePool(Layer):
    """Take the mean, the largest or the sum of each of `size` bins: (b, *spatial, c) to (b, *size, c).

    In the dtype of the input. `size` is one number for all spatial axes or one for each, None where an axis is to
    stay as it is. Bin i of m over n places is PyTorch's, from floor(i n / m) up to ceil((i + 1) n / m): bins overlap
    where m does not divide n.
    """

    takes_statistics: ClassVar[bool] = True

    size: int | tuple[int | None, ...]
    _: KW_ONLY
    by: Reduction = "mean"
    layout: str = "channel_last"
    accum_dtype: DType = None  # None: the input's own

    def __post_init__(self):
        check_reduction(f"{self}", self.by)

    def init(self, rng, x):
        adaptive_sizes(f"{self}", self.size, x, parse_layout(f"{self}", self.layout, x))
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return adaptive_pool(x, self.size, self.by, layout=self.layout, accum_dtype=self.accum_dtype), non_trainables
