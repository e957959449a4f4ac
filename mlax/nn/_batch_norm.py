"""BatchNorm: normalisation of each channel by the statistics of the batch."""

from dataclasses import KW_ONLY
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from mlax.core import DType, Initializer, Layer, Ones, Zeros, frozen
from mlax.dtypes import cast
from mlax.nn._affine import scale_and_shift
from mlax.nn._channels import channels
from mlax.nn._state import check_state_dtype
from mlax.ops import batch_norm, batch_statistics


@frozen
class BatchNorm(Layer):
    """Normalise each channel over the batch and all other axes, then scale and shift by learned numbers.

    (b, ..., c), with the channels along `axis`; shape and dtype of the input. Inference uses running statistics,
    and `frozen=True` uses them in training too. https://arxiv.org/abs/1502.03167, algorithms 1 and 2.

    Trainables: scale and shift (c,), unless `scale=False` or `shift=False`. Non-trainables: mean and var (c,), in
    `accum_dtype`; each training step moves them towards the batch's (its variance by count - 1) by the fraction
    `momentum`, which is PyTorch's convention and 1 less that of Keras and Flax. `corrected=True` weighs the first
    steps so that the zeros and ones of `init` leave no trace, and keeps their number in count, an int32.

    Under `jit`, the statistics of a batch that is sharded over devices are those of the whole batch. Under
    `shard_map`, name the axis of the devices in `axis_name`, or each takes its own.
    """

    takes_statistics: ClassVar[bool] = True

    _: KW_ONLY
    axis: int = -1
    momentum: float = 0.1
    eps: float = 1e-5
    scale: bool = True
    shift: bool = True
    frozen: bool = False
    corrected: bool = False
    axis_name: str | tuple[str, ...] | None = None
    scale_init: Initializer = Ones()
    shift_init: Initializer = Zeros()
    accum_dtype: DType = None  # None: the input's own
    param_dtype: DType = None  # None: the input's own

    def __post_init__(self):
        if not 0.0 < self.momentum <= 1.0:
            raise ValueError(
                f"BatchNorm: momentum is {self.momentum}, but must be above 0 and at most 1: the weight of the new "
                "batch. To keep the running statistics as they are, pass frozen=True."
            )

    def init(self, rng, x):
        shape, dtype = (channels(self, x),), self.accum_dtype or x.dtype
        state = {"mean": jnp.zeros(shape, dtype), "var": jnp.ones(shape, dtype)}
        if self.corrected:
            state["count"] = jnp.zeros((), jnp.int32)
        return scale_and_shift(self, rng, shape, self.param_dtype or x.dtype), state

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        state: Any = non_trainables
        check_state_dtype(self, state, self.accum_dtype or x.dtype)
        if self.frozen or inference_mode or x.size == 0:
            mean, var = state["mean"], state["var"]
        else:
            mean, var, state = self._statistics(x, state)
        y = batch_norm(x, mean, var, **cast(trainables, x.dtype) or {}, axis=self.axis, eps=self.eps)
        return y, state

    def _statistics(self, x, state):
        """The mean and variance of the batch, and the state moved towards them."""
        try:
            mean, var, total = batch_statistics(
                x, axis=self.axis, axis_name=self.axis_name, accum_dtype=self.accum_dtype
            )
        except NameError as error:
            raise NameError(
                f"{self}: no axis is named so here; call fwd under a shard_map or vmap with that axis, or leave "
                "axis_name out: under jit a sharded batch gives the statistics of the whole batch."
            ) from error
        weight, new = self.momentum, {}
        if self.corrected:
            new["count"] = state["count"] + 1
            steps = lax.full_like(
                1.0, new["count"]
            )  # weakly typed, like Python's numbers: not rounded to a narrow dtype
            weight = self.momentum / (1.0 - (1.0 - self.momentum) ** steps)
        unbiased = lax.stop_gradient(var) * (total / max(total - 1, 1))
        new["mean"] = state["mean"] + weight * (lax.stop_gradient(mean) - state["mean"])
        new["var"] = state["var"] + weight * (unbiased - state["var"])
        return mean, var, new
