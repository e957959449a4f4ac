"""Decay: weight decay for an optimizer that has none."""

from mlax._jax import cast_scalar
from mlax.core import frozen
from mlax.optim._around import Around
from mlax.optim._leafwise import chosen
from mlax.optim._numbers import Amount
from mlax.optim._optimizer import Advanced
from mlax.optim._patterns import Patterns


@frozen
class Decay(Around):
    """`decay * w` taken off the weights at each step; or, if it is `coupled`, added to the gradient.

    Not times the rate, which the optimizer inside keeps to itself. Leaves that match a pattern of `decayed`; without
    patterns, those named kernel or table. https://arxiv.org/abs/1711.05101
    """

    elementwise = True
    decay: Amount = 1e-4
    decayed: Patterns | None = None
    coupled: bool = False

    def patterns(self):
        return (*(self.decayed or ()), *self.optimizer.patterns())

    def advance(self, now, grads, weights, slots):
        decay = now.numbers(self)["decay"]
        mine = [path for path in grads if chosen(self.decayed, path)]
        off = {path: cast_scalar(decay, weights[path]) * weights[path] for path in mine}
        if self.coupled:
            return self.optimizer.advance(
                now, {**grads, **{path: grads[path] + off[path] for path in mine}}, weights, slots
            )
        new, after = self.optimizer.advance(now, grads, weights, slots)
        return Advanced({**new, **{path: new[path] - off[path] for path in mine if path in new}}, after)
