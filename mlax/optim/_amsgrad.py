"""AMSGrad: Adam whose mean square never falls."""

from jax import lax

from mlax.core import frozen
from mlax.optim._adam import quotient
from mlax.optim._leafwise import Leafwise
from mlax.optim._moving_average import average
from mlax.optim._numbers import Amount, Beta, Rate
from mlax.optim._slot import Slot


@frozen
class AMSGrad(Leafwise):
    """Adam with the largest mean square so far in place of the mean square.

    Slots: mean, square, largest. Algorithm 2 of https://openreview.net/forum?id=ryQu7f-RZ, with Adam's corrections.
    """

    elementwise = True
    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: Amount = 1e-8

    def keeps(self, path, w):
        return {"mean": Slot(), "square": Slot(wide=True), "largest": Slot(wide=True)}

    def step(self, now, g, w, slots):
        mean, square = average(slots["mean"], g, now.b1), average(slots["square"], g * g, now.b2)
        largest = lax.max(slots["largest"], square)
        return w - now.rate * quotient(now, mean, largest), {"mean": mean, "square": square, "largest": largest}
