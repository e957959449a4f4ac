"""ScheduleFree and ScheduleFreeSGD, which average their weights instead of decaying their learning rate."""

from collections.abc import Mapping
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import lax

from mlax.core import frozen
from mlax.optim._hyperparams import Beta, Count, Hyperparams, NonNegative, Patterns, Range, Rate
from mlax.optim._leafwise import Leafwise
from mlax.optim._slots import Slot
from mlax.optim._trees import moving_average

Momentum = Annotated[float, Range(0.01, 1.0)]  # close to 0, `x` would be a quotient of rounding errors


class ScheduleFreeAverage(Leafwise):
    """The averages of schedule-free optimizers. Not decorated: each declares these fields in its own order."""

    rate: Rate
    b1: Momentum
    warmup: Count

    def scalars(self):
        return {"weight": 0.0, "largest_rate": 0.0}

    def learning_rates(self, context, before, after):
        now = Hyperparams(context.step, context.hyperparams(self))
        return {"rate": self._warm_up(now)}

    def _warm_up(self, now: Hyperparams) -> jax.Array:
        rate = jnp.asarray(now.rate, now.dtype)
        return rate * jnp.minimum(now.t / self.warmup, 1.0).astype(rate.dtype) if self.warmup else rate

    def shared_values(self, now, scalars):
        rate = self._warm_up(now)
        largest = jnp.maximum(scalars["largest_rate"], rate)
        weight = scalars["weight"] + largest * largest
        share = jnp.where(weight > 0, largest * largest / jnp.where(weight > 0, weight, 1.0), 0.0)
        return {"rate": rate, "largest_rate": largest, "weight": weight, "share": share}

    def move(
        self, now: Hyperparams, step: jax.Array, w: jax.Array, slots: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The new trainables `y`, and the new base, which `step` moves."""
        base = slots["base"] - now.rate * step
        # (1 - b1) * base + b1 * x, where x, as in eval_weights, has moved by `share` towards the new base
        rest = 1 - now.share
        y = rest * w - rest * (1 - self.b1) * slots["base"] + (1 - rest * self.b1) * base
        return y, {"base": base}

    def eval_weights(self, path, w, slots, step):
        return (w - (1 - self.b1) * slots["base"]) / self.b1


@frozen
class ScheduleFree(ScheduleFreeAverage):
    """Schedule-free AdamW: steps of `base` by gradients at `y = (1 - b1) * base + b1 * x`, the trainables.

    `eval_trainables` returns `x`, the mean of `base` weighted by the square of the largest rate so far. The rate warms
    up over `warmup` steps. `b1` is one number for all steps, since `x` is not stored but computed from `base` and `y`.
    Statistics such as BatchNorm's are not averaged: they are those of `y`, which stays close to `x`.
    Algorithm 1 of https://arxiv.org/abs/2405.15682. `decayed` as in `AdamW`.
    Slots: base, square. Scalars: weight, the sum of all weights; largest_rate, the largest rate so far.

    >>> optimizer = optim.ScheduleFree(1e-3)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'base', 'square', 'weight', 'largest_rate')
    """

    elementwise = True
    rate: Rate  # the learning rate, a number or a schedule
    b1: Momentum = 0.9  # the weight of the average in the trainables
    b2: Beta = 0.999  # the decay rate of the mean of squares
    eps: NonNegative = 1e-8  # added to the denominator
    decay: NonNegative = 0.0  # the weight decay
    decayed: Patterns | None = None  # patterns of the leaves to decay; None: those named kernel or table
    warmup: Count = 0  # steps of a linear warm-up

    def leaf_slots(self, path, w):
        return {"base": Slot(copy=True, wide=True), "square": Slot(wide=True)}

    def leaf_update(self, now, g, w, slots):
        square = moving_average(slots["square"], g * g, now.b2)
        step = now.add_decay(g / now.add_eps(lax.sqrt(square * now.bias_correction(now.b2))), w)
        y, new = self.move(now, step, w, slots)
        return y, {**new, "square": square}


@frozen
class ScheduleFreeSGD(ScheduleFreeAverage):
    """Schedule-free SGD: `ScheduleFree` with the gradient itself as the step, and so without a mean square.

    Its rate should be as large as trains, often well above that of SGD with momentum. Equations 3 to 5 of
    https://arxiv.org/abs/2405.15682. `decayed` as in `AdamW`. Slot: base. Scalars: weight, largest_rate.

    >>> optimizer = optim.ScheduleFreeSGD(1.0)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'base', 'weight', 'largest_rate')
    """

    elementwise = True
    rate: Rate  # the learning rate, a number or a schedule
    b1: Momentum = 0.9  # the weight of the average in the trainables
    decay: NonNegative = 0.0  # the weight decay
    decayed: Patterns | None = None  # patterns of the leaves to decay; None: those named kernel or table
    warmup: Count = 0  # steps of a linear warm-up

    def leaf_slots(self, path, w):
        return {"base": Slot(copy=True, wide=True)}

    def leaf_update(self, now, g, w, slots):
        return self.move(now, now.add_decay(g, w), w, slots)
