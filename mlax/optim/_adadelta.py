"""Adadelta: steps as long as the steps before."""

from jax import lax

from mlax.core import frozen
from mlax.optim._leafwise import Leafwise
from mlax.optim._moving_average import average
from mlax.optim._numbers import Amount, Beta, Rate
from mlax.optim._slot import Slot


@frozen
class Adadelta(Leafwise):
    """The gradient times the root of the mean square of past steps over that of past gradients.

    Slots: square, of the gradients; change, the mean square of the steps. Algorithm 1 of https://arxiv.org/abs/1212.5701
    """

    elementwise = True
    rate: Rate = 1.0
    b2: Beta = 0.9
    eps: Amount = 1e-6

    def keeps(self, path, w):
        return {"square": Slot(wide=True), "change": Slot(wide=True)}

    def step(self, now, g, w, slots):
        square = average(slots["square"], g * g, now.b2)
        step = lax.sqrt(slots["change"] + now.eps) / lax.sqrt(square + now.eps) * g
        return w - now.rate * step, {"square": square, "change": average(slots["change"], step * step, now.b2)}
