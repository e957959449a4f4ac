"""Lion: the sign of a momentum."""

from jax import lax

from mlax.core import frozen
from mlax.optim._leafwise import Leafwise
from mlax.optim._moving_average import average
from mlax.optim._numbers import Amount, Beta, Rate
from mlax.optim._patterns import Patterns
from mlax.optim._slot import Slot


@frozen
class Lion(Leafwise):
    """`w - rate * (sign(b1 * mean + (1 - b1) * g) + decay * w)`; one slot, mean, which averages by `b2`.

    Its rate is 3 to 10 times smaller than Adam's, its decay as much larger. `decayed` as in `AdamW`.
    Program 1 of https://arxiv.org/abs/2302.06675
    """

    elementwise = True
    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.99
    decay: Amount = 0.0
    decayed: Patterns | None = None

    def keeps(self, path, w):
        return {"mean": Slot()}

    def step(self, now, g, w, slots):
        step = lax.sign(average(slots["mean"], g, now.b1))
        return w - now.rate * now.decayed(step, w), {"mean": average(slots["mean"], g, now.b2)}
