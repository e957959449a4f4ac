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
from mlax.ops import Padding, Sizes, larger, mean_pool, pool, pool_windows


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
        return _checked(self, x)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return pool(x, self.combine, self.start, **_settings(self)), non_trainables


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
        return _checked(self, x)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return pool(x, larger, -math.inf, **_settings(self)), non_trainables


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
        return _checked(self, x)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return pool(x, lax.add, 0.0, accum_dtype=self.accum_dtype, **_settings(self)), non_trainables


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
        return _checked(self, x)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y = mean_pool(x, count_padding=self.count_padding, accum_dtype=self.accum_dtype, **_settings(self))
        return y, non_trainables


def _settings(layer: Any) -> dict[str, Any]:
    """The fields that all of them have, as `ops` takes them."""
    return {name: getattr(layer, name) for name in ("window", "strides", "padding", "dilation", "ceil", "layout")}


def _checked(layer: Any, x: Any) -> tuple[None, None]:
    """No variables, once the windows are known to fit the input."""
    pool_windows(f"{layer}", x, **_settings(layer))
    return None, None
