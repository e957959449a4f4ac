"""GlobalPool and AdaptivePool: all places reduced to one, or to a given number of bins, whatever their number."""

from dataclasses import KW_ONLY
from typing import ClassVar

from mlax.core import DType, Layer, frozen
from mlax.ops import PoolBy, adaptive_pool, adaptive_sizes, check_by, global_pool, layout_of


@frozen
class GlobalPool(Layer):
    """Take the mean, the largest or the sum of all places: (b, *spatial, c) to (b, c), in the dtype of the input.

    With `keep_axes=True` the spatial axes stay, of size 1. The gradient of the largest goes to the first of equals.
    """

    takes_statistics: ClassVar[bool] = True

    _: KW_ONLY
    by: PoolBy = "mean"
    keep_axes: bool = False
    layout: str = "channel_last"
    accum_dtype: DType = None  # None: the input's own

    def __post_init__(self):
        check_by(f"{self}", self.by)

    def init(self, rng, x):
        layout_of(f"{self}", self.layout, x)
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
    by: PoolBy = "mean"
    layout: str = "channel_last"
    accum_dtype: DType = None  # None: the input's own

    def __post_init__(self):
        check_by(f"{self}", self.by)

    def init(self, rng, x):
        adaptive_sizes(f"{self}", self.size, x, layout_of(f"{self}", self.layout, x))
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return adaptive_pool(x, self.size, self.by, layout=self.layout, accum_dtype=self.accum_dtype), non_trainables
