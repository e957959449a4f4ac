"""LAMB: Adam whose steps are as long as the weights of a leaf."""

from mlax.core import frozen
from mlax.optim._adam import adam
from mlax.optim._leafwise import Leafwise
from mlax.optim._norms import norm, ratio
from mlax.optim._numbers import Amount, Beta, Rate
from mlax.optim._patterns import Patterns
from mlax.optim._slot import Slot


@frozen
class LAMB(Leafwise):
    """AdamW's step, decay included, times the norm of a leaf's weights over the norm of that step.

    Slots: mean, square. `decayed` as in `AdamW`. Algorithm 2 of https://arxiv.org/abs/1904.00962
    """

    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: Amount = 1e-6
    decay: Amount = 0.01
    decayed: Patterns | None = None

    def keeps(self, path, w):
        return {"mean": Slot(), "square": Slot(wide=True)}

    def step(self, now, g, w, slots):
        step, kept = adam(now, g, slots)
        step = now.decayed(step, w)
        return w - now.rate * ratio(norm(w), norm(step)) * step, kept
