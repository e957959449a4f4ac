"""Adam: the mean of the gradients over the root of their mean square."""

from jax import lax

from mlax.core import frozen
from mlax.optim._leafwise import Leafwise
from mlax.optim._moving_average import average
from mlax.optim._numbers import Amount, Beta, Rate
from mlax.optim._slot import Slot


@frozen
class Adam(Leafwise):
    """`w - rate * mean / (sqrt(square) + eps)`, both moving averages corrected for their beginning at zero.

    Slots: mean, square. Algorithm 1 of https://arxiv.org/abs/1412.6980
    """

    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: Amount = 1e-8

    def keeps(self, path, w):
        return {"mean": Slot(), "square": Slot(wide=True)}

    def step(self, now, g, w, slots):
        mean, square = average(slots["mean"], g, now.b1), average(slots["square"], g * g, now.b2)
        root = lax.sqrt(square * now.debias(now.b2))
        step = mean * now.debias(now.b1) / (root + now.eps)
        return w - now.rate * step, {"mean": mean, "square": square}
