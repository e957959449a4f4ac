"""Linear: a learned affine map over the last axis."""

from dataclasses import KW_ONLY

from jax.lax import PrecisionLike

from mlax import ops
from mlax._jax import named_key
from mlax.core import DType, Initializer, Layer, Size, Zeros, frozen, lecun
from mlax.dtypes import cast


@frozen
class Linear(Layer):
    """Multiply the last axis by a learned matrix and add a learned vector.

    (..., d) to (..., features), in the dtype of the input; d is read at `init`.
    Trainables: kernel (d, features); bias (features,) unless `bias=False`.
    """

    features: Size
    _: KW_ONLY
    bias: bool = True
    kernel_init: Initializer = lecun()
    bias_init: Initializer = Zeros()
    precision: PrecisionLike = None
    accum_dtype: DType = None  # None: the input's own
    param_dtype: DType = None  # None: the input's own

    def init(self, rng, x):
        if x.ndim == 0:
            raise ValueError(f"{self}: the input is a scalar but needs a last axis; reshape it to (1,).")
        dtype = self.param_dtype or x.dtype
        kernel = self.kernel_init(named_key(rng, "kernel"), (x.shape[-1], self.features), dtype)
        if not self.bias:
            return {"kernel": kernel}, None
        return {
            "kernel": kernel,
            "bias": self.bias_init(named_key(rng, "bias"), (self.features,), dtype),
        }, None

    def splits(self, number):
        return {"kernel": -1, "bias": -1}

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        weights = cast(trainables, x.dtype)
        y = ops.linear(x, **weights, precision=self.precision, accum_dtype=self.accum_dtype)
        return y, non_trainables
