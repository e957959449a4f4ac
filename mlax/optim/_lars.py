"""LARS: momentum whose rate follows the weights of a leaf."""

from mlax.core import frozen
from mlax.optim._leafwise import Leafwise
from mlax.optim._norms import norm, ratio
from mlax.optim._numbers import Amount, Beta, Rate
from mlax.optim._patterns import Patterns
from mlax.optim._slot import Slot


@frozen
class LARS(Leafwise):
    """SGD with momentum at the rate `rate * trust * |w| / (|g| + decay * |w|)`, decay included, leaf by leaf.

    Leaves that do not decay, biases and norms for the most part, keep the rate as it is. `decayed` as in `AdamW`.
    Slot: momentum. Algorithm 1 of https://arxiv.org/abs/1708.03888
    """

    rate: Rate
    momentum: Beta = 0.9
    trust: Amount = 0.001
    decay: Amount = 1e-4
    decayed: Patterns | None = None

    def keeps(self, path, w):
        return {"momentum": Slot()}

    def step(self, now, g, w, slots):
        step = now.rate * g
        if self._decays(now.path):
            size = norm(w)
            scale = ratio(now.trust * size, norm(g), now.decay * size)
            step = now.rate * scale * now.decayed(g, w)
        m = now.momentum * slots["momentum"] + step
        return w - m, {"momentum": m}
