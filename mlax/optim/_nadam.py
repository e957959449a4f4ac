"""NAdam: Adam with Nesterov's momentum."""

from jax import lax

from mlax.core import frozen
from mlax.optim._leafwise import Leafwise
from mlax.optim._moving_average import average
from mlax.optim._numbers import Amount, Beta, Rate
from mlax.optim._slot import Slot


@frozen
class NAdam(Leafwise):
    """Adam that looks one step of its momentum ahead; the momentum grows to `b1` as `momentum_decay` says.

    Slots: mean, square. Scalar: product, of the momenta so far.
    Algorithm 8 and section 3 of https://cs229.stanford.edu/proj2015/054_report.pdf
    """

    elementwise = True
    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: Amount = 1e-8
    momentum_decay: Amount = 4e-3

    def keeps(self, path, w):
        return {"mean": Slot(), "square": Slot(wide=True)}

    def scalars(self):
        return {"product": 1.0}

    def shared(self, now, scalars):
        this, ahead = (now.b1 * (1 - 0.5 * 0.96 ** (now.momentum_decay * t)) for t in (now.t, now.t + 1))
        return {"product": scalars["product"] * this, "this": this, "ahead": ahead}

    def step(self, now, g, w, slots):
        mean, square = average(slots["mean"], g, now.b1), average(slots["square"], g * g, now.b2)
        by_gradient = (1 - now.this) / (1 - now.product)
        by_mean = now.ahead / (1 - now.product * now.ahead)
        root = lax.sqrt(square * now.debias(now.b2)) + now.eps
        return w - now.rate * (by_gradient * g + by_mean * mean) / root, {"mean": mean, "square": square}
