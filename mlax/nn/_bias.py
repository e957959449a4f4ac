"""Bias: a learned array added to the input."""

from dataclasses import KW_ONLY

from mlax._jax import named_key
from mlax.core import DType, Initializer, Layer, Zeros, frozen
from mlax.dtypes import cast
from mlax.nn._axes import shape_over


@frozen
class Bias(Layer):
    """Add a learned number to each element, one for each place along `axes`; the other axes share it.

    Shape and dtype of the input. Trainables: bias, of the rank of the last of `axes` and all after it.
    """

    _: KW_ONLY
    axes: tuple[int, ...] = (-1,)
    bias_init: Initializer = Zeros()
    param_dtype: DType = None  # None: the input's own

    def init(self, rng, x):
        bias = self.bias_init(named_key(rng, "bias"), shape_over(self, x, self.axes), self.param_dtype or x.dtype)
        return {"bias": bias}, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return x + cast(trainables["bias"], x.dtype), non_trainables
