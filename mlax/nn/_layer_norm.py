"""LayerNorm: normalisation of each example by its own statistics."""

from dataclasses import KW_ONLY
from typing import ClassVar

from mlax import ops
from mlax.core import DType, Initializer, Layer, Ones, Zeros, frozen
from mlax.dtypes import cast
from mlax.nn._affine import scale_and_shift
from mlax.nn._axes import shape_over


@frozen
class LayerNorm(Layer):
    """Subtract the mean over `axes`, divide by the standard deviation, then scale and shift by learned numbers.

    Shape and dtype of the input. Trainables: scale and shift, of the input's sizes along `axes`, unless
    `scale=False` or `shift=False`. https://arxiv.org/abs/1607.06450, equation 4.
    """

    takes_statistics: ClassVar[bool] = True

    _: KW_ONLY
    axes: tuple[int, ...] = (-1,)
    eps: float = 1e-5
    scale: bool = True
    shift: bool = True
    scale_init: Initializer = Ones()
    shift_init: Initializer = Zeros()
    accum_dtype: DType = None  # None: the input's own
    param_dtype: DType = None  # None: the input's own

    def init(self, rng, x):
        return scale_and_shift(self, rng, shape_over(self, x, self.axes), self.param_dtype or x.dtype), None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        weights = cast(trainables, x.dtype) or {}
        y = ops.layer_norm(x, **weights, axes=self.axes, eps=self.eps, accum_dtype=self.accum_dtype)
        return y, non_trainables
