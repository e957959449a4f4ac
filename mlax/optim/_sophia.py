"""SophiaG: momentum over an estimate of the curvature, with clipped steps."""

import jax.numpy as jnp

from mlax.core import frozen
from mlax.optim._hyperparams import (
    Beta,
    Hyperparams,
    NonNegative,
    Patterns,
    Positive,
    PositiveCount,
    Rate,
    hyperparams_at,
)
from mlax.optim._leafwise import Leafwise
from mlax.optim._slots import Slot
from mlax.optim._trees import moving_average


@frozen
class SophiaG(Leafwise):
    """Sophia-G: `w - rate * clip(mean / max(gamma * curvature, eps), -1, 1)`, with weight decay as in `AdamW`.

    The curvature is a moving average over calls of `estimate`, which is due `every` updates; without any, the steps are
    those of the sign of `mean`. `train.step` makes them, given `sampled=`. Algorithm 3, and 2 for the estimate, of
    https://arxiv.org/abs/2305.14342. Slots: mean, curvature.

    >>> optimizer = optim.SophiaG(1e-4)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'curvature')
    """

    elementwise = True
    rate: Rate  # the learning rate, a number or a schedule
    b1: Beta = 0.96  # the decay rate of the mean of gradients
    b2: Beta = 0.99  # the decay rate of the curvature
    gamma: NonNegative = 0.01  # the factor of the curvature
    eps: Positive = 1e-12  # the least denominator
    decay: NonNegative = 0.1  # the weight decay
    decayed: Patterns | None = None  # patterns of the leaves to decay; None: those named kernel or table
    every: PositiveCount = 10  # updates between two estimates of the curvature

    def leaf_slots(self, path, w):
        return {"mean": Slot(), "curvature": Slot(wide=True)}

    def leaf_update(self, now, g, w, slots):
        mean = moving_average(slots["mean"], g, now.b1)
        step = jnp.clip(mean / jnp.maximum(now.gamma * slots["curvature"], now.eps), -1.0, 1.0)
        return w - now.rate * now.add_decay(step, w), {"mean": mean, "curvature": slots["curvature"]}

    def estimate_every(self):
        return self.every

    def estimate_leaf(self, step, path, g, slots, examples):
        now = Hyperparams(step, hyperparams_at(self, step, {}), path, g.dtype)
        return {"curvature": moving_average(slots["curvature"].astype(g.dtype), examples * g * g, now.b2)}
