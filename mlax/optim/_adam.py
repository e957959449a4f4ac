"""The Adam family: Adam, AdamW, AMSGrad, NAdam, RAdam, AdaBelief, AdEMAMix and LAMB."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlax.core import frozen
from mlax.optim._base import Leafwise
from mlax.optim._hyperparams import Beta, Hyperparams, NonNegative, Patterns, Rate
from mlax.optim._slots import Slot
from mlax.optim._trees import moving_average, norm, trust_ratio


@frozen
class Adam(Leafwise):
    """`w - rate * mean / (sqrt(square) + eps)`, both moving averages corrected for their beginning at zero.

    Slots: mean, square. Algorithm 1 of https://arxiv.org/abs/1412.6980
    """

    elementwise = True
    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: NonNegative = 1e-8

    def keeps(self, path, w):
        return {"mean": Slot(), "square": Slot(wide=True)}

    def step(self, now, g, w, slots):
        step, kept = adam(now, g, slots)
        return w - now.rate * step, kept


def adam(now: Hyperparams, g: jax.Array, slots: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Adam's step, not yet times its rate, and the next mean and square."""
    mean, square = moving_average(slots["mean"], g, now.b1), moving_average(slots["square"], g * g, now.b2)
    return adam_direction(now, mean, square), {"mean": mean, "square": square}


def adam_direction(now: Hyperparams, mean: jax.Array, square: jax.Array) -> jax.Array:
    """`mean / (sqrt(square) + eps)`, both corrected for their beginning at zero."""
    root = lax.sqrt(square * now.debias(now.b2))
    return mean * now.debias(now.b1) / (root + now.eps)


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
    eps: NonNegative = 1e-8
    decay: NonNegative = 0.01
    decayed: Patterns | None = None

    def keeps(self, path, w):
        return {"mean": Slot(), "square": Slot(wide=True)}

    def step(self, now, g, w, slots):
        step, kept = adam(now, g, slots)
        return w - now.rate * now.decayed(step, w), kept


@frozen
class AMSGrad(Leafwise):
    """Adam with the largest mean square so far in place of the mean square.

    Slots: mean, square, largest. Algorithm 2 of https://openreview.net/forum?id=ryQu7f-RZ, with Adam's corrections.
    """

    elementwise = True
    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: NonNegative = 1e-8

    def keeps(self, path, w):
        return {"mean": Slot(), "square": Slot(wide=True), "largest": Slot(wide=True)}

    def step(self, now, g, w, slots):
        mean, square = moving_average(slots["mean"], g, now.b1), moving_average(slots["square"], g * g, now.b2)
        largest = lax.max(slots["largest"], square)
        return w - now.rate * adam_direction(now, mean, largest), {"mean": mean, "square": square, "largest": largest}


@frozen
class NAdam(Leafwise):
    """Adam that looks one step of its momentum ahead; the momentum grows to `b1` as `momentum_decay` says.

    Slots: mean, square. Scalar: product, of the momenta so far.
    Algorithm 8 and section 3 of https://cs229.stanford.edu/proj2015/054_report.pdf
    """

    elementwise = True
    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: NonNegative = 1e-8
    momentum_decay: NonNegative = 4e-3

    def keeps(self, path, w):
        return {"mean": Slot(), "square": Slot(wide=True)}

    def scalars(self):
        return {"product": 1.0}

    def shared(self, now, scalars):
        this, ahead = (now.b1 * (1 - 0.5 * 0.96 ** (now.momentum_decay * t)) for t in (now.t, now.t + 1))
        return {"product": scalars["product"] * this, "this": this, "ahead": ahead}

    def step(self, now, g, w, slots):
        mean, square = moving_average(slots["mean"], g, now.b1), moving_average(slots["square"], g * g, now.b2)
        by_gradient = (1 - now.this) / (1 - now.product)
        by_mean = now.ahead / (1 - now.product * now.ahead)
        root = lax.sqrt(square * now.debias(now.b2)) + now.eps
        return w - now.rate * (by_gradient * g + by_mean * mean) / root, {"mean": mean, "square": square}


@frozen
class RAdam(Leafwise):
    """Adam times a factor for the variance of its mean square; where that is not known yet, the mean alone.

    Slots: mean, square. Algorithm 2 of https://arxiv.org/abs/1908.03265
    """

    elementwise = True
    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: NonNegative = 1e-8

    def keeps(self, path, w):
        return {"mean": Slot(), "square": Slot(wide=True)}

    def shared(self, now, scalars):
        longest = 2 / (1 - now.b2) - 1
        length = _sma_length(now.b2, now.t)
        known = jnp.maximum(length, 5.0)  # keeps the root real where it is not used
        factor = (known - 4) * (known - 2) * longest / ((longest - 4) * (longest - 2) * known)
        return {"known": (length > 5).astype(now.dtype), "factor_of_known": jnp.sqrt(factor)}

    def step(self, now, g, w, slots):
        mean, square = moving_average(slots["mean"], g, now.b1), moving_average(slots["square"], g * g, now.b2)
        over = lax.rsqrt(now.debias(now.b2)) / (lax.sqrt(square) + now.eps)
        factor = jnp.where(now.known > 0, now.factor_of_known * over, jnp.ones_like(over))
        return w - now.rate * mean * now.debias(now.b1) * factor, {"mean": mean, "square": square}


def _sma_length(beta: Any, t: jax.Array) -> jax.Array:
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


@frozen
class AdaBelief(Leafwise):
    """Adam with the mean square of the difference between gradient and mean in place of that of the gradient.

    Slots: mean, surprise. Algorithm 2 of https://arxiv.org/abs/2010.07468
    """

    elementwise = True
    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: NonNegative = 1e-16

    def keeps(self, path, w):
        return {"mean": Slot(), "surprise": Slot(wide=True)}

    def step(self, now, g, w, slots):
        mean = moving_average(slots["mean"], g, now.b1)
        difference = g - mean
        surprise = moving_average(slots["surprise"], difference * difference, now.b2) + now.eps
        return w - now.rate * adam_direction(now, mean, surprise), {"mean": mean, "surprise": surprise}


@frozen
class AdEMAMix(Leafwise):
    """AdamW whose numerator adds `alpha` times an average over many more steps, by `b3`.

    Over `warmup` steps alpha rises from 0 linearly, and b3 from b1 so that its half-life does. `decayed` as in `AdamW`.
    Slots: mean, slow, square. Algorithm 1 of https://arxiv.org/abs/2409.03137
    """

    elementwise = True
    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.999
    b3: Beta = 0.9999
    alpha: NonNegative = 5.0
    warmup: int = 0
    eps: NonNegative = 1e-8
    decay: NonNegative = 0.0
    decayed: Patterns | None = None

    def keeps(self, path, w):
        return {"mean": Slot(), "slow": Slot(wide=True), "square": Slot(wide=True)}

    def shared(self, now, scalars):
        if self.warmup == 0:
            return {}
        part = jnp.minimum(now.t / self.warmup, 1.0)
        first, last = jnp.log(jnp.asarray(now.b1, part.dtype)), jnp.log(jnp.asarray(now.b3, part.dtype))
        rising = jnp.exp(first * last / ((1 - part) * last + part * first))
        return {"alpha": now.alpha * part, "b3": jnp.minimum(rising, now.b3)}

    def step(self, now, g, w, slots):
        mean, slow = moving_average(slots["mean"], g, now.b1), moving_average(slots["slow"], g, now.b3)
        square = moving_average(slots["square"], g * g, now.b2)
        root = lax.sqrt(square * now.debias(now.b2))
        step = (mean * now.debias(now.b1) + now.alpha * slow) / (root + now.eps)
        return w - now.rate * now.decayed(step, w), {"mean": mean, "slow": slow, "square": square}


@frozen
class LAMB(Leafwise):
    """AdamW's step, decay included, times the norm of a leaf's weights over the norm of that step.

    Slots: mean, square. `decayed` as in `AdamW`. Algorithm 2 of https://arxiv.org/abs/1904.00962
    """

    rate: Rate
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: NonNegative = 1e-6
    decay: NonNegative = 0.01
    decayed: Patterns | None = None

    def keeps(self, path, w):
        return {"mean": Slot(), "square": Slot(wide=True)}

    def step(self, now, g, w, slots):
        step, kept = adam(now, g, slots)
        step = now.decayed(step, w)
        return w - now.rate * trust_ratio(norm(w), norm(step)) * step, kept
