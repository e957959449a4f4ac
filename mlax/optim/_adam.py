"""Adam: the mean of the gradients over the root of their mean square."""

from collections.abc import Mapping

import jax
from jax import lax

from mlax.core import frozen
from mlax.optim._leafwise import Leafwise
from mlax.optim._moving_average import average
from mlax.optim._numbers import Amount, Beta, Numbers, Rate
from mlax.optim._slot import Slot


@frozen
class Adam(Leafwise):
    """`w - rate * mean / (sqrt(square) + eps)`, both moving averages corrected for their beginning at zero.

    Slots: mean, square. Algorithm 1 of https://arxiv.org/abs/1412.6980
    """

    elementwise = True
    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: Amount = 1e-8

    def keeps(self, path, w):
        return {"mean": Slot(), "square": Slot(wide=True)}

    def step(self, now, g, w, slots):
        step, kept = adam(now, g, slots)
        return w - now.rate * step, kept


def adam(now: Numbers, g: jax.Array, slots: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Adam's step, not yet times its rate, and the next mean and square."""
    mean, square = average(slots["mean"], g, now.b1), average(slots["square"], g * g, now.b2)
    return quotient(now, mean, square), {"mean": mean, "square": square}


def quotient(now: Numbers, mean: jax.Array, square: jax.Array) -> jax.Array:
    """`mean / (sqrt(square) + eps)`, both corrected for their beginning at zero."""
    root = lax.sqrt(square * now.debias(now.b2))
    return mean * now.debias(now.b1) / (root + now.eps)
