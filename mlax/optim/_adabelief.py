"""AdaBelief: Adam that divides by how much gradients surprise."""

from mlax.core import frozen
from mlax.optim._adam import quotient
from mlax.optim._leafwise import Leafwise
from mlax.optim._moving_average import average
from mlax.optim._numbers import Amount, Beta, Rate
from mlax.optim._slot import Slot


@frozen
class AdaBelief(Leafwise):
    """Adam with the mean square of the difference between gradient and mean in place of that of the gradient.

    Slots: mean, surprise. Algorithm 2 of https://arxiv.org/abs/2010.07468
    """

    elementwise = True
    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: Amount = 1e-16

    def keeps(self, path, w):
        return {"mean": Slot(), "surprise": Slot(wide=True)}

    def step(self, now, g, w, slots):
        mean = average(slots["mean"], g, now.b1)
        difference = g - mean
        surprise = average(slots["surprise"], difference * difference, now.b2) + now.eps
        return w - now.rate * quotient(now, mean, surprise), {"mean": mean, "surprise": surprise}
