"""Plateau: a rate that falls when the loss no longer does."""

import jax.numpy as jnp

from mlax.core import frozen
from mlax.optim._around import Around
from mlax.optim._numbers import Amount, Beta
from mlax.optim._optimizer import Advanced


@frozen
class Plateau(Around):
    """The rate times `factor` each time that `value`, passed to `update`, has not improved for `patience` steps.

    To improve is to fall below the best by its part `threshold`. For `cooldown` steps after a fall nothing is counted,
    and the whole factor does not fall below `least`. Give the mean loss of `every` updates a look, not each one alone.
    Scalars: best, gathered_value, waited, scale.
    """

    elementwise = True
    factor: Beta = 0.1
    patience: int = 10
    threshold: Amount = 1e-4
    cooldown: int = 0
    every: int = 1
    least: Amount = 0.0

    def adds_scalars(self):
        return {"best": float("inf"), "gathered_value": 0.0, "waited": 0, "scale": 1.0}

    def advance(self, now, grads, weights, slots):
        if now.value is None:
            raise TypeError("Plateau: update needs the loss that it watches: update(..., value=loss).")
        numbers = now.numbers(self)
        mine = {"best", "gathered_value", "waited", "scale"}
        inner = {name: slot for name, slot in slots.items() if name not in mine}
        best, waited, scale = slots["best"], slots["waited"], slots["scale"]
        gathered = slots["gathered_value"] + jnp.asarray(now.value).astype(best.dtype)
        due = now.step % self.every == self.every - 1
        value = gathered / self.every
        better = due & (value < best * (1 - numbers["threshold"]))
        waited = jnp.where(better, jnp.minimum(waited, 0), waited + due.astype(jnp.int32))
        falls = waited > self.patience
        scale = jnp.where(falls, jnp.maximum(scale * numbers["factor"], numbers["least"]), scale)
        scaled = now.scaled(dict.fromkeys(grads, scale))
        new, after = self.optimizer.advance(scaled, grads, weights, inner)
        own = {
            "best": jnp.where(better, value, best),
            "gathered_value": jnp.where(due, jnp.zeros_like(gathered), gathered),
            "waited": jnp.where(falls, -self.cooldown, waited),
            "scale": scale,
        }
        return Advanced(new, {**after, **own})
