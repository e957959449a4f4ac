"""Adagrad: rates that shrink with the sum of the squares seen."""

from jax import lax

from mlax.core import frozen
from mlax.optim._leafwise import Leafwise
from mlax.optim._numbers import Amount, Rate
from mlax.optim._slot import Slot


@frozen
class Adagrad(Leafwise):
    """`w - rate * g / (sqrt(total) + eps)`, where `total` adds up the squares of the gradients, beginning at `start`.

    Slot: total. https://jmlr.org/papers/v12/duchi11a.html
    """

    elementwise = True
    rate: Rate
    start: float = 0.0
    eps: Amount = 1e-10

    def keeps(self, path, w):
        return {"total": Slot(start=self.start, wide=True)}

    def step(self, now, g, w, slots):
        total = slots["total"] + g * g
        return w - now.rate * g / (lax.sqrt(total) + now.eps), {"total": total}
