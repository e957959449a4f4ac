"""AdEMAMix: Adam with a second, much slower mean."""

import jax.numpy as jnp
from jax import lax

from mlax.core import frozen
from mlax.optim._leafwise import Leafwise
from mlax.optim._moving_average import average
from mlax.optim._numbers import Amount, Beta, Rate
from mlax.optim._patterns import Patterns
from mlax.optim._slot import Slot


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
    alpha: Amount = 5.0
    warmup: int = 0
    eps: Amount = 1e-8
    decay: Amount = 0.0
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
        mean, slow = average(slots["mean"], g, now.b1), average(slots["slow"], g, now.b3)
        square = average(slots["square"], g * g, now.b2)
        root = lax.sqrt(square * now.debias(now.b2))
        step = (mean * now.debias(now.b1) + now.alpha * slow) / (root + now.eps)
        return w - now.rate * now.decayed(step, w), {"mean": mean, "slow": slow, "square": square}
