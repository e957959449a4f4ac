"""RMSNorm: normalisation of each example by its own mean square."""

from dataclasses import KW_ONLY
from typing import ClassVar

from mlax._jax import named_key
from mlax.core import DType, Initializer, Layer, Ones, frozen
from mlax.dtypes import cast
from mlax.nn._axes import shape_over
from mlax.ops import rms_norm


@frozen
class RMSNorm(Layer):
    """Divide by the root of the mean square over `axes`, then scale by learned numbers.

    Shape and dtype of the input. Trainables: scale, of the input's sizes along `axes`, unless `scale=False`.
    https://arxiv.org/abs/1910.07467, equation 4.
    """

    takes_statistics: ClassVar[bool] = True

    _: KW_ONLY
    axes: tuple[int, ...] = (-1,)
    eps: float = 1e-6
    scale: bool = True
    scale_init: Initializer = Ones()
    accum_dtype: DType = None  # None: the input's own
    param_dtype: DType = None  # None: the input's own

    def init(self, rng, x):
        shape = shape_over(self, x, self.axes)
        if not self.scale:
            return None, None
        return {"scale": self.scale_init(named_key(rng, "scale"), shape, self.param_dtype or x.dtype)}, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        weights = cast(trainables, x.dtype) or {}
        y = rms_norm(x, **weights, axes=self.axes, eps=self.eps, accum_dtype=self.accum_dtype)
        return y, non_trainables
