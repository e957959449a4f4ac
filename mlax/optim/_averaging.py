"""Average and Lookahead: averages of the weights over steps."""

import jax.numpy as jnp

from mlax._jax import cast_scalar, widest_dtype
from mlax.core import DType, frozen
from mlax.optim._base import StepResult
from mlax.optim._hyperparams import Beta, NonNegative
from mlax.optim._slots import Slot
from mlax.optim._trees import moving_average
from mlax.optim._wrappers import OptimizerWrapper


@frozen
class Average(OptimizerWrapper):
    """`averaged` gives the mean of the weights after each step: exponential, by `decay`, or with `decay=None` of all.

    It begins with the step `start`; before, it is the weights themselves. What came before its beginning leaves no
    trace: the exponential one is corrected as Adam's are. Slot: average, in `dtype`. https://doi.org/10.1137/0330046
    """

    elementwise = True
    decay: Beta | None = 0.999
    start: int = 0
    dtype: DType = None  # None: that of the weights, or float32 if that is narrower

    def adds(self, path, w):
        return {"average": Slot(dtype=self.dtype, copies=True, wide=True)}

    def advance(self, now, grads, weights, slots):
        new, after = self.optimizer.advance(now, grads, weights, slots)
        seen = jnp.maximum(now.step - self.start, 0).astype(widest_dtype(g.dtype for g in grads.values()))
        keep = seen / (seen + 1)
        if self.decay is not None:
            decay = cast_scalar(now.numbers(self)["decay"], seen)
            keep = decay * jnp.expm1(seen * jnp.log(decay)) / jnp.expm1((seen + 1) * jnp.log(decay))
        means = {path: moving_average(slots["average"][path], w, keep.astype(w.dtype)) for path, w in new.items()}
        return StepResult(new, {**after, "average": means})

    def shows(self, path, w, slots, step):
        return slots["average"]


@frozen
class Lookahead(OptimizerWrapper):
    """Every `every` steps the slow weights go the part `alpha` of the way to the fast, which go on from there.

    Slot: slow, which `averaged` gives. Algorithm 1 of https://arxiv.org/abs/1907.08610
    """

    elementwise = True
    every: int = 6
    alpha: NonNegative = 0.5

    def adds(self, path, w):
        return {"slow": Slot(copies=True, wide=True)}

    def advance(self, now, grads, weights, slots):
        fast, after = self.optimizer.advance(now, grads, weights, slots)
        alpha = now.numbers(self)["alpha"]
        due = now.step % self.every == self.every - 1
        met = {
            path: slots["slow"][path] + cast_scalar(alpha, w) * (w - slots["slow"][path]) for path, w in fast.items()
        }
        slow = {path: jnp.where(due, w, slots["slow"][path]) for path, w in met.items()}
        return StepResult({path: jnp.where(due, met[path], w) for path, w in fast.items()}, {**after, "slow": slow})

    def shows(self, path, w, slots, step):
        return slots["slow"]
