"""Lookahead: slow weights that follow fast ones from time to time."""

import jax.numpy as jnp

from mlax._jax import cast_scalar
from mlax.core import frozen
from mlax.optim._around import Around
from mlax.optim._numbers import Amount
from mlax.optim._optimizer import Advanced
from mlax.optim._slot import Slot


@frozen
class Lookahead(Around):
    """Every `every` steps the slow weights go the part `alpha` of the way to the fast, which go on from there.

    Slot: slow, which `averaged` gives. Algorithm 1 of https://arxiv.org/abs/1907.08610
    """

    elementwise = True
    every: int = 6
    alpha: Amount = 0.5

    def adds(self, path, w):
        return {"slow": Slot(copies=True, wide=True)}

    def advance(self, now, grads, weights, slots):
        fast, after = self.optimizer.advance(now, grads, weights, slots)
        alpha = now.numbers(self)["alpha"]
        due = now.step % self.every == self.every - 1
        met = {
            path: slots["slow"][path] + cast_scalar(alpha, w) * (w - slots["slow"][path]) for path, w in fast.items()
        }
        slow = {path: jnp.where(due, w, slots["slow"][path]) for path, w in met.items()}
        return Advanced({path: jnp.where(due, met[path], w) for path, w in fast.items()}, {**after, "slow": slow})

    def shows(self, path, w, slots, step):
        return slots["slow"]
