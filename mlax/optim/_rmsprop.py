"""RMSProp: gradients over the root of their mean square."""

import jax.numpy as jnp
from jax import lax

from mlax.core import frozen
from mlax.optim._leafwise import Leafwise
from mlax.optim._moving_average import average
from mlax.optim._numbers import Amount, Beta, Rate
from mlax.optim._slot import Slot


@frozen
class RMSProp(Leafwise):
    """`w - rate * g / (sqrt(square) + eps)`, where `square` is the moving average of the gradients' squares.

    `centred` takes their variance instead; `momentum` adds up the steps. Slots: square; mean, if centred; momentum, if
    there is one. https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf,
    centred: equations 38 to 45 of https://arxiv.org/abs/1308.0850
    """

    elementwise = True
    rate: Rate
    b2: Beta = 0.99
    eps: Amount = 1e-8
    momentum: Beta = 0.0
    centred: bool = False

    def keeps(self, path, w):
        kept = {"square": Slot(wide=True)}
        kept |= {"mean": Slot(wide=True)} if self.centred else {}
        return kept if self.momentum == 0 else {**kept, "momentum": Slot()}

    def step(self, now, g, w, slots):
        new = {"square": average(slots["square"], g * g, now.b2)}
        square = new["square"]
        if self.centred:
            new["mean"] = average(slots["mean"], g, now.b2)
            square = lax.max(
                square - new["mean"] * new["mean"], jnp.zeros_like(square)
            )  # rounding may make it negative
        step = g / (lax.sqrt(square) + now.eps)
        if "momentum" in slots:
            step = new["momentum"] = now.momentum * slots["momentum"] + step
        return w - now.rate * step, new
