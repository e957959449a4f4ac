"""ScheduleFree: AdamW that averages its weights instead of decaying its learning rate."""

import jax.numpy as jnp
from jax import lax

from mlax.core import frozen
from mlax.optim._base import Leafwise
from mlax.optim._hyperparams import Beta, Hyperparams, NonNegative, Patterns, Rate, hyperparams_at
from mlax.optim._slots import Slot
from mlax.optim._trees import moving_average


@frozen
class ScheduleFree(Leafwise):
    """Schedule-free AdamW: steps of `base` by gradients at `y = (1 - b1) * base + b1 * x`, the trainables.

    `eval_trainables` returns `x`, the mean of `base` weighted by the square of the largest rate so far. The rate warms
    up over `warmup` steps. Algorithm 1 of https://arxiv.org/abs/2405.15682. `decayed` as in `AdamW`.
    Slots: base, square. Scalars: weight, the sum of all weights; largest, the largest rate.
    """

    elementwise = True
    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: NonNegative = 1e-8
    decay: NonNegative = 0.0
    decayed: Patterns | None = None
    warmup: int = 0

    def leaf_slots(self, path, w):
        return {"base": Slot(copy=True, wide=True), "square": Slot(wide=True)}

    def scalars(self):
        return {"weight": 0.0, "largest": 0.0}

    def shared_values(self, now, scalars):
        rate = jnp.asarray(now.rate, now.dtype)
        rate = rate * jnp.minimum(now.t / self.warmup, 1.0) if self.warmup else rate
        largest = jnp.maximum(scalars["largest"], rate)
        weight = scalars["weight"] + largest * largest
        share = jnp.where(weight > 0, largest * largest / jnp.where(weight > 0, weight, 1.0), 0.0)
        return {"rate": rate, "largest": largest, "weight": weight, "share": share}

    def leaf_update(self, now, g, w, slots):
        square = moving_average(slots["square"], g * g, now.b2)
        step = now.add_decay(g / (lax.sqrt(square * now.bias_correction(now.b2)) + now.eps), w)
        base = slots["base"] - now.rate * step
        # (1 - b1) * base + b1 * x, where x, as in eval_weights, has moved by `share` towards the new base
        rest = 1 - now.share
        y = rest * w - rest * (1 - now.b1) * slots["base"] + (1 - rest * now.b1) * base
        return y, {"base": base, "square": square}

    def eval_weights(self, path, w, slots, step):
        b1 = Hyperparams(step, hyperparams_at(self, step, {}), path, w.dtype).b1
        return (w - (1 - b1) * slots["base"]) / b1
