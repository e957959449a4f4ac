"""AdamW: Adam whose weight decay acts on the weights and not on the gradient."""

from jax import lax

from mlax.core import frozen
from mlax.optim._leafwise import Leafwise
from mlax.optim._moving_average import average
from mlax.optim._numbers import Amount, Beta, Rate
from mlax.optim._slot import Slot


@frozen
class AdamW(Leafwise):
    """Adam, and `rate * decay * w` taken off the leaves that match a pattern of `decayed`.

    Without patterns those are the ones named kernel or table. Slots: mean, square.
    Algorithm 2 of https://arxiv.org/abs/1711.05101
    """

    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: Amount = 1e-8
    decay: Amount = 0.01
    decayed: tuple[str, ...] | None = None

    def keeps(self, path, w):
        return {"mean": Slot(), "square": Slot(wide=True)}

    def step(self, now, g, w, slots):
        mean, square = average(slots["mean"], g, now.b1), average(slots["square"], g * g, now.b2)
        root = lax.sqrt(square * now.debias(now.b2))
        step = mean * now.debias(now.b1) / (root + now.eps)
        return w - now.rate * now.decayed(step, w), {"mean": mean, "square": square}
