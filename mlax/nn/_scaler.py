"""Scaler: a learned array multiplied with the input."""

from dataclasses import KW_ONLY

from mlax._jax import named_key
from mlax.core import DType, Initializer, Layer, Ones, frozen
from mlax.dtypes import cast
from mlax.nn._axes import shape_over


@frozen
class Scaler(Layer):
    """Multiply each element by a learned number, one for each place along `axes`; the other axes share it.

    Shape and dtype of the input. Trainables: scale, of the rank of the last of `axes` and all after it.
    """

    _: KW_ONLY
    axes: tuple[int, ...] = (-1,)
    scale_init: Initializer = Ones()
    param_dtype: DType = None  # None: the input's own

    def init(self, rng, x):
        scale = self.scale_init(named_key(rng, "scale"), shape_over(self, x, self.axes), self.param_dtype or x.dtype)
        return {"scale": scale}, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return x * cast(trainables["scale"], x.dtype), non_trainables
