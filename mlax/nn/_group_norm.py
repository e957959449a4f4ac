"""GroupNorm: normalisation of each example over groups of its channels."""

from dataclasses import KW_ONLY
from typing import ClassVar

from mlax.core import DType, Initializer, Layer, Ones, Zeros, frozen
from mlax.dtypes import cast
from mlax.nn._affine import scale_and_shift
from mlax.nn._channels import channels
from mlax.ops import group_norm


@frozen
class GroupNorm(Layer):
    """Normalise over all axes but the batch and within `groups` of neighbouring channels, then scale and shift.

    (b, ..., c), of any rank, with the channels along `axis`; shape and dtype of the input. Trainables: scale and
    shift (c,), unless `scale=False` or `shift=False`. https://arxiv.org/abs/1803.08494, equation 7.
    """

    takes_statistics: ClassVar[bool] = True

    groups: int
    _: KW_ONLY
    axis: int = -1
    eps: float = 1e-5
    scale: bool = True
    shift: bool = True
    scale_init: Initializer = Ones()
    shift_init: Initializer = Zeros()
    accum_dtype: DType = None  # None: the input's own
    param_dtype: DType = None  # None: the input's own

    def __post_init__(self):
        if self.groups < 1:
            raise ValueError(f"GroupNorm: groups is {self.groups}, but must be at least 1.")

    def init(self, rng, x):
        size = channels(self, x)
        if size % self.groups:
            raise ValueError(
                f"{self}: the {size} channels of the input {x.shape} do not divide into {self.groups} groups; "
                f"pass a number that divides {size}."
            )
        return scale_and_shift(self, rng, (size,), self.param_dtype or x.dtype), None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        weights = cast(trainables, x.dtype) or {}
        y = group_norm(x, **weights, groups=self.groups, axis=self.axis, eps=self.eps, accum_dtype=self.accum_dtype)
        return y, non_trainables
