"""RAdam: Adam that waits with the mean square until it is known well enough."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlax.core import frozen
from mlax.optim._leafwise import Leafwise
from mlax.optim._moving_average import average
from mlax.optim._numbers import Amount, Beta, Rate
from mlax.optim._slot import Slot


@frozen
class RAdam(Leafwise):
    """Adam times a factor for the variance of its mean square; where that is not known yet, the mean alone.

    Slots: mean, square. Algorithm 2 of https://arxiv.org/abs/1908.03265
    """

    elementwise = True
    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: Amount = 1e-8

    def keeps(self, path, w):
        return {"mean": Slot(), "square": Slot(wide=True)}

    def shared(self, now, scalars):
        longest = 2 / (1 - now.b2) - 1
        length = _length(now.b2, now.t)
        known = jnp.maximum(length, 5.0)  # keeps the root real where it is not used
        factor = (known - 4) * (known - 2) * longest / ((longest - 4) * (longest - 2) * known)
        return {"known": (length > 5).astype(now.dtype), "factor_of_known": jnp.sqrt(factor)}

    def step(self, now, g, w, slots):
        mean, square = average(slots["mean"], g, now.b1), average(slots["square"], g * g, now.b2)
        over = lax.rsqrt(now.debias(now.b2)) / (lax.sqrt(square) + now.eps)
        factor = jnp.where(now.known > 0, now.factor_of_known * over, jnp.ones_like(over))
        return w - now.rate * mean * now.debias(now.b1) * factor, {"mean": mean, "square": square}


def _length(beta: Any, t: jax.Array) -> jax.Array:
    """`2 / (1 - beta) - 1 - 2 t beta^t / (1 - beta^t)`, which is about t, without its two large terms.

    With `x = -t log(beta)` they are `2 / log(1 / beta) * (1 - x / (exp(x) - 1))`, and a rest that is small.
    """
    if isinstance(beta, float):
        slope = -math.log(beta)
        rest = 2 / (1 - beta) - 1 - 2 / slope
    else:
        slope = -jnp.log(beta)
        rest = (1 - beta) / 6 + (1 - beta) ** 2 / 12
    x = jnp.minimum(t * slope, 80.0)  # from there on the quotient is 1
    series = x * x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (1 + x / 8))))))
    above = jnp.where(x < 0.5, series, jnp.expm1(x) - x)  # exp(x) - 1 - x
    return rest + 2 / slope * above / jnp.expm1(x)
