"""InstanceNorm: normalisation of each channel of each example."""

from dataclasses import KW_ONLY
from typing import ClassVar

from mlax.core import DType, Initializer, Layer, Ones, Zeros, frozen
from mlax.dtypes import cast
from mlax.nn._affine import scale_and_shift
from mlax.nn._channels import channels
from mlax.ops import group_norm


@frozen
class InstanceNorm(Layer):
    """Normalise each channel of each example over all other axes, then scale and shift.

    (b, ..., c), of rank 3 or more, with the channels along `axis`; shape and dtype of the input. Trainables: scale
    and shift (c,), unless `scale=False` or `shift=False`. https://arxiv.org/abs/1607.08022, equation 2.
    """

    takes_statistics: ClassVar[bool] = True

    _: KW_ONLY
    axis: int = -1
    eps: float = 1e-5
    scale: bool = True
    shift: bool = True
    scale_init: Initializer = Ones()
    shift_init: Initializer = Zeros()
    accum_dtype: DType = None  # None: the input's own
    param_dtype: DType = None  # None: the input's own

    def init(self, rng, x):
        size = channels(self, x)
        if x.ndim < 3:
            raise ValueError(
                f"{self}: the input has the shape {x.shape}, which leaves no axis to take statistics over; "
                "it needs a batch axis, a channel axis and at least one more. Use LayerNorm over (-1,) otherwise."
            )
        return scale_and_shift(self, rng, (size,), self.param_dtype or x.dtype), None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        weights = cast(trainables, x.dtype) or {}
        groups = x.shape[self.axis]
        y = group_norm(x, **weights, groups=groups, axis=self.axis, eps=self.eps, accum_dtype=self.accum_dtype)
        return y, non_trainables
