"""The Adam family: Adam, AdamW, AMSGrad, NAdam, RAdam, AdaBelief, AdEMAMix and LAMB."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlax.core import frozen
from mlax.optim._hyperparams import Beta, Count, Hyperparams, NonNegative, Patterns, Rate, log_beta
from mlax.optim._leafwise import Leafwise
from mlax.optim._slots import Slot
from mlax.optim._trees import moving_average, norm, trust_ratio


@frozen
class Adam(Leafwise):
    """Adam: `w - rate * mean / (sqrt(square) + eps)`, with bias-corrected moving averages of the gradient and its
    square.

    Algorithm 1 of https://arxiv.org/abs/1412.6980. Slots: mean, square.

    >>> optimizer = optim.Adam(1e-3)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'square')
    """

    elementwise = True
    rate: Rate  # the learning rate, a number or a schedule
    b1: Beta = 0.9  # the decay rate of the mean of gradients
    b2: Beta = 0.999  # the decay rate of the mean of squares
    eps: NonNegative = 1e-8  # added to the denominator

    def leaf_slots(self, path, w):
        return {"mean": Slot(), "square": Slot(wide=True)}

    def is_bounded(self, path):
        return type(self).leaf_update in (Adam.leaf_update, AdamW.leaf_update)  # those of other subclasses may not be

    def leaf_update(self, now, g, w, slots):
        moments = adam_moments(now, g, slots)
        return w - now.rate * adam_direction(now, **moments), moments


def adam_moments(now: Hyperparams, g: jax.Array, slots: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The new moving averages of the gradient and its square."""
    return {
        "mean": moving_average(slots["mean"], g, now.b1),
        "square": moving_average(slots["square"], g * g, now.b2),
    }


def adam_direction(now: Hyperparams, mean: jax.Array, square: jax.Array) -> jax.Array:
    """`mean / (sqrt(square) + eps)`, both bias-corrected."""
    mean_factor, square_factor = now.bias_corrections(now.b1, now.b2)
    return mean * mean_factor / now.add_eps(lax.sqrt(square * square_factor))


@frozen
class AdamW(Adam):
    """AdamW, Adam with decoupled weight decay: also subtracts `rate * decay * w` from leaves that match `decayed`.

    Without patterns, from leaves named kernel or table. Algorithm 2 of https://arxiv.org/abs/1711.05101.
    Slots: mean, square.

    >>> optimizer = optim.AdamW(optim.WarmupCosine(3e-4, warmup=1_000, total=100_000), decay=0.1)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'square')
    """

    decay: NonNegative = 0.01  # the weight decay
    decayed: Patterns | None = None  # patterns of the leaves to decay; None: those named kernel or table

    def leaf_update(self, now, g, w, slots):
        moments = adam_moments(now, g, slots)
        return w - now.rate * now.add_decay(adam_direction(now, **moments), w), moments


@frozen
class AMSGrad(Adam):
    """AMSGrad: Adam with the maximum so far of the mean square in place of the mean square.

    Algorithm 2 of https://openreview.net/forum?id=ryQu7f-RZ, with Adam's bias correction.
    Slots: mean, square, largest.

    >>> optimizer = optim.AMSGrad(1e-3)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'square', 'largest')
    """

    def leaf_slots(self, path, w):
        return {**super().leaf_slots(path, w), "largest": Slot(wide=True)}

    def leaf_update(self, now, g, w, slots):
        moments = adam_moments(now, g, slots)
        largest = lax.max(slots["largest"], moments["square"])
        return w - now.rate * adam_direction(now, moments["mean"], largest), {**moments, "largest": largest}


@frozen
class NAdam(Adam):
    """NAdam: Adam with Nesterov momentum, which grows to `b1` at a speed set by `momentum_decay`.

    Algorithm 8 and section 3 of https://cs229.stanford.edu/proj2015/054_report.pdf.
    Slots: mean, square. Scalar: product, of the momenta so far.

    >>> optimizer = optim.NAdam(2e-3)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'square', 'product')
    """

    momentum_decay: NonNegative = 4e-3  # how fast the momentum grows to b1

    def scalars(self):
        return {"product": 1.0}

    def shared_values(self, now, scalars):
        momentum, next_momentum = (now.b1 * (1 - 0.5 * 0.96 ** (now.momentum_decay * t)) for t in (now.t, now.t + 1))
        return {"product": scalars["product"] * momentum, "momentum": momentum, "next_momentum": next_momentum}

    def leaf_update(self, now, g, w, slots):
        moments = adam_moments(now, g, slots)
        grad_coeff = (1 - now.momentum) / (1 - now.product)
        mean_coeff = now.next_momentum / (1 - now.product * now.next_momentum)
        root = now.add_eps(lax.sqrt(moments["square"] * now.bias_correction(now.b2)))
        return w - now.rate * (grad_coeff * g + mean_coeff * moments["mean"]) / root, moments


@frozen
class RAdam(Adam):
    """Rectified Adam: Adam times a rectification of the variance of its mean square, or its mean alone in steps where
    that variance is unknown.

    Algorithm 2 of https://arxiv.org/abs/1908.03265. Slots: mean, square.

    >>> optimizer = optim.RAdam(1e-3)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'square')
    """

    def shared_values(self, now, scalars):
        longest = jnp.maximum(2 / (1 - now.b2) - 1, 5.0)
        length = _sma_length(now.b2, now.t)
        known = jnp.maximum(length, 5.0)  # like `longest`, keeps the root real where it is not used
        factor = (known - 4) * (known - 2) * longest / ((longest - 4) * (longest - 2) * known)
        return {"is_known": (length > 5).astype(now.dtype), "rectification": jnp.sqrt(factor)}

    def leaf_update(self, now, g, w, slots):
        moments = adam_moments(now, g, slots)
        mean_factor, square_factor = now.bias_corrections(now.b1, now.b2)
        inverse_root = lax.rsqrt(square_factor) / now.add_eps(lax.sqrt(moments["square"]))
        factor = jnp.where(now.is_known > 0, now.rectification * inverse_root, jnp.ones_like(inverse_root))
        return w - now.rate * moments["mean"] * mean_factor * factor, moments


def _sma_length(beta: Any, t: jax.Array) -> jax.Array:
    """`2 / (1 - beta) - 1 - 2 t beta^t / (1 - beta^t)`, which is about t, without its two large terms.

    With `x = -t log(beta)` they are `2 / log(1 / beta) * (1 - x / (exp(x) - 1))` plus a small remainder.
    """
    slope = -log_beta(beta, t.dtype)
    rest = 1 - beta if isinstance(beta, float) else (1 - beta).astype(t.dtype)
    remainder = 2 / rest - 1 - 2 / slope
    if not isinstance(beta, float):  # near 1 a series, in which the two large terms have cancelled
        remainder = jnp.where(rest < 0.03, rest / 6 + rest * rest / 12, remainder)
    x = jnp.minimum(t * slope, 80.0)  # the quotient is 1 from there on
    series = x * x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (1 + x / 8))))))
    numerator = jnp.where(x < 0.5, series, jnp.expm1(x) - x)  # exp(x) - 1 - x
    return remainder + 2 / slope * numerator / jnp.expm1(x)


@frozen
class AdaBelief(Adam):
    """AdaBelief: Adam with the mean square of `g - mean` in place of that of `g`.

    Algorithm 2 of https://arxiv.org/abs/2010.07468. Slots: mean, surprise.

    >>> optimizer = optim.AdaBelief(1e-3)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'surprise')
    """

    eps: NonNegative = 1e-16  # added to the denominator

    def leaf_slots(self, path, w):
        return {"mean": Slot(), "surprise": Slot(wide=True)}

    def leaf_update(self, now, g, w, slots):
        mean = moving_average(slots["mean"], g, now.b1)
        deviation = g - mean
        surprise = moving_average(slots["surprise"], deviation * deviation, now.b2) + now.eps
        return w - now.rate * adam_direction(now, mean, surprise), {"mean": mean, "surprise": surprise}


@frozen
class AdEMAMix(Leafwise):
    """AdEMAMix: AdamW whose numerator adds `alpha` times a slower moving average of the gradient, with decay rate `b3`.

    Over `warmup` steps alpha grows linearly from 0, and b3 from b1 such that its half-life grows linearly.
    Algorithm 1 of https://arxiv.org/abs/2409.03137. `decayed` as in `AdamW`. Slots: mean, slow_mean, square.

    >>> optimizer = optim.AdEMAMix(1e-3)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'slow_mean', 'square')
    """

    elementwise = True
    rate: Rate  # the learning rate, a number or a schedule
    b1: Beta = 0.9  # the decay rate of the mean of gradients
    b2: Beta = 0.999  # the decay rate of the mean of squares
    b3: Beta = 0.9999  # the decay rate of the slow mean of gradients
    alpha: NonNegative = 5.0  # the weight of the slow mean
    warmup: Count = 0  # steps until alpha and b3 are reached
    eps: NonNegative = 1e-8  # added to the denominator
    decay: NonNegative = 0.0  # the weight decay
    decayed: Patterns | None = None  # patterns of the leaves to decay; None: those named kernel or table

    def leaf_slots(self, path, w):
        return {"mean": Slot(), "slow_mean": Slot(wide=True), "square": Slot(wide=True)}

    def shared_values(self, now, scalars):
        if self.warmup == 0:
            return {}
        fraction = jnp.minimum(now.t / self.warmup, 1.0)
        first, last = log_beta(now.b1, fraction.dtype), log_beta(now.b3, fraction.dtype)
        b3 = jnp.exp(last / ((1 - fraction) * (last / first) + fraction))
        return {"alpha": now.alpha * fraction, "b3": jnp.minimum(b3, now.b3)}

    def leaf_update(self, now, g, w, slots):
        moments = adam_moments(now, g, slots)
        slow = moving_average(slots["slow_mean"], g, now.b3)
        mean_factor, square_factor = now.bias_corrections(now.b1, now.b2)
        root = lax.sqrt(moments["square"] * square_factor)
        step = (moments["mean"] * mean_factor + now.alpha * slow) / now.add_eps(root)
        return w - now.rate * now.add_decay(step, w), {**moments, "slow_mean": slow}


@frozen
class LAMB(AdamW):
    """LAMB: AdamW's step, weight decay included, scaled to the norm of the weights of each leaf.

    Algorithm 2 of https://arxiv.org/abs/1904.00962. `decayed` as in `AdamW`. Slots: mean, square.

    >>> optimizer = optim.LAMB(1e-3, decay=0.01)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'square')
    """

    elementwise = False
    eps: NonNegative = 1e-6  # added to the denominator

    def leaf_update(self, now, g, w, slots):
        moments = adam_moments(now, g, slots)
        step = now.add_decay(adam_direction(now, **moments), w)
        return w - now.rate * trust_ratio(norm(w), norm(step)) * step, moments
