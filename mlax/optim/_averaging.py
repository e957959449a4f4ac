"""Average and Lookahead: wrappers that average the weights over steps."""

from typing import Any

import jax
import jax.numpy as jnp

from mlax._jax import cast_scalar, widest_dtype
from mlax.core import DType, frozen
from mlax.optim._base import StepResult
from mlax.optim._hyperparams import Beta, Count, NonNegative, PositiveCount, log_beta
from mlax.optim._slots import Slot
from mlax.optim._trees import moving_average
from mlax.optim._update import UpdateContext
from mlax.optim._wrappers import OptimizerWrapper


@frozen
class Average(OptimizerWrapper):
    """An exponential moving average (EMA) of the weights, which `eval_trainables` returns; with `decay=None`, their
    uniform average.

    The average begins at step `start`, before which it is the weights themselves; the exponential one is
    bias-corrected. https://doi.org/10.1137/0330046. Running statistics, the state in leaves named `mean` and `var`,
    must be averaged too, by `update_average`, as `train.step` does; all other state keeps its last value. Slot:
    average, in `dtype`.

    >>> optimizer, trainables = optim.Average(optim.AdamW(3e-4), decay=0.999), {"kernel": jnp.ones((4, 3))}
    >>> state = optimizer.init(trainables)
    >>> ema = optimizer.eval_trainables(state, trainables)
    """

    elementwise = True
    keeps_bounds = True
    decay: Beta | None = 0.999  # of the moving average (EMA); None: the mean of all
    start: Count = 0  # the step at which it begins
    dtype: DType = None  # None: that of the weights, or float32 if that is narrower

    def extra_slots(self, path, w):
        return {"average": Slot(dtype=self.dtype, copy=True, wide=True)}

    def update_leaves(self, context, grads, weights, slots):
        new, new_slots = self.optimizer.update_leaves(context, grads, weights, slots)
        beta = self._beta(context, widest_dtype(g.dtype for g in grads.values()))
        averages = {path: moving_average(slots["average"][path], w, beta.astype(w.dtype)) for path, w in new.items()}
        return StepResult(new, {**new_slots, "average": averages})

    def eval_weights(self, path, w, slots, step):
        return slots["average"]

    def average_weight(self, context, path):
        return 1 - self._beta(context, jnp.float32)

    def _beta(self, context: UpdateContext, dtype: Any) -> jax.Array:
        """The weight of the average so far in the new one."""
        count = jnp.maximum(context.step - self.start, 0).astype(dtype)
        if self.decay is None:
            return count / (count + 1)
        decay = context.hyperparams(self)["decay"]
        log_decay = log_beta(decay, dtype)
        return cast_scalar(decay, count) * jnp.expm1(count * log_decay) / jnp.expm1((count + 1) * log_decay)


@frozen
class Lookahead(OptimizerWrapper):
    """Lookahead: every `every` steps, move slow weights the fraction `alpha` towards the fast ones, and reset these to
    them.

    `eval_trainables` returns the slow weights. Algorithm 1 of https://arxiv.org/abs/1907.08610. Slot: slow.

    >>> optimizer = optim.Lookahead(optim.AdamW(3e-4), every=6)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'square', 'slow')
    """

    elementwise = True
    every: PositiveCount = 6  # updates between two steps of the slow weights
    alpha: NonNegative = 0.5  # how far the slow weights move

    def extra_slots(self, path, w):
        return {"slow": Slot(copy=True, wide=True)}

    def update_leaves(self, context, grads, weights, slots):
        fast, new_slots = self.optimizer.update_leaves(context, grads, weights, slots)
        alpha, slow = context.hyperparams(self)["alpha"], slots["slow"]
        due = self._is_due(context)
        moved = {path: slow[path] + cast_scalar(alpha, w) * (w - slow[path]) for path, w in fast.items()}
        new_slow = {path: jnp.where(due, w, slow[path]) for path, w in moved.items()}
        return StepResult(
            {path: jnp.where(due, moved[path], w) for path, w in fast.items()}, {**new_slots, "slow": new_slow}
        )

    def eval_weights(self, path, w, slots, step):
        return slots["slow"]

    def average_weight(self, context, path):
        alpha = jnp.asarray(context.hyperparams(self)["alpha"], jnp.float32)
        return jnp.where(self._is_due(context), alpha, jnp.zeros_like(alpha))

    def _is_due(self, context: UpdateContext) -> jax.Array:
        return context.step % self.every == self.every - 1
