"""AdamW: Adam whose weight decay acts on the weights and not on the gradient."""

from mlax.core import frozen
from mlax.optim._adam import adam
from mlax.optim._leafwise import Leafwise
from mlax.optim._numbers import Amount, Beta, Rate
from mlax.optim._patterns import Patterns
from mlax.optim._slot import Slot


@frozen
class AdamW(Leafwise):
    """Adam, and `rate * decay * w` taken off the leaves that match a pattern of `decayed`.

    Without patterns those are the ones named kernel or table. Slots: mean, square.
    Algorithm 2 of https://arxiv.org/abs/1711.05101
    """

    elementwise = True
    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: Amount = 1e-8
    decay: Amount = 0.01
    decayed: Patterns | None = None

    def keeps(self, path, w):
        return {"mean": Slot(), "square": Slot(wide=True)}

    def step(self, now, g, w, slots):
        step, kept = adam(now, g, slots)
        return w - now.rate * now.decayed(step, w), kept
