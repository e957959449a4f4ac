"""SGD, LARS, Lion, RMSProp, Adagrad and Adadelta."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from mlax.core import frozen
from mlax.optim._hyperparams import Beta, NonNegative, Patterns, Positive, Rate, StartValue
from mlax.optim._leafwise import Leafwise
from mlax.optim._slots import Slot
from mlax.optim._trees import moving_average, norm, trust_ratio


@frozen
class SGD(Leafwise):
    """Stochastic gradient descent (SGD): `w - rate * g`; with momentum, `m = momentum * m + g` in place of `g`; with
    Nesterov's, `g + momentum * m`.

    Equations 1 to 4 of https://proceedings.mlr.press/v28/sutskever13.html, with the rate outside of the momentum.
    Slot, if there is a momentum: momentum.

    >>> optimizer = optim.SGD(0.1, momentum=0.9, nesterov=True)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'momentum')
    """

    elementwise = True
    rate: Rate  # the learning rate, a number or a schedule
    momentum: Beta = 0.0  # the decay rate of the sum of gradients
    nesterov: bool = False  # whether the gradient looks one step ahead

    def __post_init__(self):
        super().__post_init__()
        if self.nesterov and self.momentum == 0:
            raise ValueError("SGD: nesterov needs a momentum; pass momentum=0.9, say.")

    def override_error(self, name):
        return super().override_error(name) or momentum_override_error(self, name)

    def leaf_slots(self, path, w):
        return {} if self.momentum == 0 else {"momentum": Slot()}

    def leaf_update(self, now, g, w, slots):
        if not slots:
            return w - now.rate * g, {}
        m = now.momentum * slots["momentum"] + g
        return w - now.rate * (g + now.momentum * m if self.nesterov else m), {"momentum": m}


def momentum_override_error(optimizer: Any, name: str) -> str:
    """Why `update` cannot set the momentum of an optimizer whose state has none."""
    off = name == "momentum" and optimizer.momentum == 0
    return "it is 0, so that the state has no momentum; construct the optimizer with momentum=0.9, say." * off


@frozen
class LARS(Leafwise):
    """LARS: SGD with momentum and the rate `rate * trust * |w| / (|g| + decay * |w|)` for each leaf, weight decay
    included.

    Leaves without weight decay, mostly biases and norms, use `rate`. Algorithm 1 of https://arxiv.org/abs/1708.03888.
    `decayed` as in `AdamW`. Slot: momentum.

    >>> optimizer = optim.LARS(1.0, decay=1e-4)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'momentum')
    """

    rate: Rate  # the learning rate, a number or a schedule
    momentum: Beta = 0.9  # the decay rate of the sum of gradients
    trust: Positive = 0.001  # the factor of |w| / (|g| + decay * |w|)
    decay: NonNegative = 1e-4  # the weight decay
    decayed: Patterns | None = None  # patterns of the leaves to decay; None: those named kernel or table

    def leaf_slots(self, path, w):
        return {"momentum": Slot()}

    def leaf_update(self, now, g, w, slots):
        step = now.rate * g
        if self._is_decayed(now.path):
            size = norm(w)
            scale = trust_ratio(now.trust * size, norm(g), now.decay * size)
            step = now.rate * scale * now.add_decay(g, w)
        m = now.momentum * slots["momentum"] + step
        return w - m, {"momentum": m}


@frozen
class Lion(Leafwise):
    """Lion: `w - rate * (sign(b1 * mean + (1 - b1) * g) + decay * w)`, where `mean` is a moving average with `b2`.

    Its rate should be 3 to 10 times smaller than Adam's, and its decay larger by as much.
    Program 1 of https://arxiv.org/abs/2302.06675. `decayed` as in `AdamW`. Slot: mean.

    >>> optimizer = optim.Lion(1e-4, decay=1.0)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean')
    """

    elementwise = True
    rate: Rate  # the learning rate, a number or a schedule
    b1: Beta = 0.9  # the weight of the mean in the update
    b2: Beta = 0.99  # the decay rate of the mean of gradients
    decay: NonNegative = 0.0  # the weight decay
    decayed: Patterns | None = None  # patterns of the leaves to decay; None: those named kernel or table

    def leaf_slots(self, path, w):
        return {"mean": Slot()}

    def leaf_update(self, now, g, w, slots):
        step = lax.sign(moving_average(slots["mean"], g, now.b1))
        return w - now.rate * now.add_decay(step, w), {"mean": moving_average(slots["mean"], g, now.b2)}


@frozen
class RMSProp(Leafwise):
    """RMSProp: `w - rate * g / (sqrt(square) + eps)`, where `square` is a moving average of `g * g`.

    With `centred`, `square` is the variance; with `momentum`, steps accumulate as in SGD.
    https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf; centred, equations 38 to 45 of
    https://arxiv.org/abs/1308.0850. Slots: square; mean, if centred; momentum, if there is one.

    >>> optimizer = optim.RMSProp(1e-3)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'square')
    """

    elementwise = True
    rate: Rate  # the learning rate, a number or a schedule
    b2: Beta = 0.99  # the decay rate of the mean of squares
    eps: NonNegative = 1e-8  # added to the denominator
    momentum: Beta = 0.0  # the decay rate of the sum of gradients
    centred: bool = False  # whether the mean is subtracted

    def override_error(self, name):
        return super().override_error(name) or momentum_override_error(self, name)

    def leaf_slots(self, path, w):
        slots = {"square": Slot(wide=True)}
        slots |= {"mean": Slot(wide=True)} if self.centred else {}
        return slots if self.momentum == 0 else {**slots, "momentum": Slot()}

    def leaf_update(self, now, g, w, slots):
        new = {"square": moving_average(slots["square"], g * g, now.b2)}
        square = new["square"]
        if self.centred:
            new["mean"] = moving_average(slots["mean"], g, now.b2)
            variance = square - new["mean"] * new["mean"]
            square = lax.max(variance, jnp.zeros_like(square))  # rounding can make it negative
        step = g / now.add_eps(lax.sqrt(square))
        if "momentum" in slots:
            step = new["momentum"] = now.momentum * slots["momentum"] + step
        return w - now.rate * step, new


@frozen
class Adagrad(Leafwise):
    """Adagrad: `w - rate * g / (sqrt(total) + eps)`, where `total` is `start` plus the sum of all squared gradients.

    Figure 1 of https://jmlr.org/papers/v12/duchi11a.html. Slot: total.

    >>> optimizer = optim.Adagrad(1e-2)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'total')
    """

    elementwise = True
    rate: Rate  # the learning rate, a number or a schedule
    start: StartValue = 0.0  # of the sum of squares
    eps: NonNegative = 1e-10  # added to the denominator

    def leaf_slots(self, path, w):
        return {"total": Slot(start=self.start, wide=True)}

    def leaf_update(self, now, g, w, slots):
        total = slots["total"] + g * g
        return w - now.rate * g / now.add_eps(lax.sqrt(total)), {"total": total}


@frozen
class Adadelta(Leafwise):
    """Adadelta: `w - rate * sqrt(change + eps) / sqrt(square + eps) * g`, with mean squares of past steps and of
    gradients.

    Algorithm 1 of https://arxiv.org/abs/1212.5701. Slots: square, of the gradients; change, of the steps.

    >>> optimizer = optim.Adadelta()
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'square', 'change')
    """

    elementwise = True
    rate: Rate = 1.0  # the learning rate, a number or a schedule
    b2: Beta = 0.9  # the decay rate of the mean of squares
    eps: Positive = 1e-6  # the first step is its root

    def leaf_slots(self, path, w):
        return {"square": Slot(wide=True), "change": Slot(wide=True)}

    def leaf_update(self, now, g, w, slots):
        square = moving_average(slots["square"], g * g, now.b2)
        step = lax.sqrt(slots["change"] + now.eps) / lax.sqrt(square + now.eps) * g
        return w - now.rate * step, {"square": square, "change": moving_average(slots["change"], step * step, now.b2)}
