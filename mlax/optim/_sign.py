"""Optimizers that use only the sign of the gradient: SignSGD and Rprop."""

import jax.numpy as jnp
from jax import lax

from mlax.core import frozen
from mlax.optim._hyperparams import Beta, NonNegative, Patterns, Rate, StartValue, UnitInterval
from mlax.optim._leafwise import Leafwise
from mlax.optim._sgd import momentum_override_error
from mlax.optim._slots import Slot
from mlax.optim._trees import moving_average


@frozen
class SignSGD(Leafwise):
    """Sign SGD: `w - rate * (sign(g) + decay * w)`; with momentum (Signum), the sign of a moving average of `g`.

    Algorithms 1 and 2 of https://arxiv.org/abs/1802.04434. `decayed` as in `AdamW`.
    Slot, if there is a momentum: mean.

    >>> optimizer = optim.SignSGD(1e-3, momentum=0.9)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean')
    """

    elementwise = True
    rate: Rate  # the learning rate, a number or a schedule
    momentum: Beta = 0.0  # the decay rate of the mean of gradients
    decay: NonNegative = 0.0  # the weight decay
    decayed: Patterns | None = None  # patterns of the leaves to decay; None: those named kernel or table

    def override_error(self, name):
        return super().override_error(name) or momentum_override_error(self, name)

    def leaf_slots(self, path, w):
        return {} if self.momentum == 0 else {"mean": Slot()}

    def leaf_update(self, now, g, w, slots):
        new = {name: moving_average(mean, g, now.momentum) for name, mean in slots.items()}
        return w - now.rate * now.add_decay(lax.sign(new.get("mean", g)), w), new


@frozen
class Rprop(Leafwise):
    """Resilient backpropagation: `w - rate * size * sign(g)`, with a step size for each element.

    A size starts at `start`. It is multiplied by `grow` while the sign of the gradient stays the same; when the sign
    changes, it is multiplied by `shrink` and the element skips that step. Sizes stay between `min_size` and `max_size`.
    For full batches: the signs of stochastic gradients change too often. https://doi.org/10.1109/ICNN.1993.298623, in
    the variant iRprop- of https://doi.org/10.1016/S0925-2312(01)00700-7, as PyTorch has it. Slots: previous, size.

    >>> optimizer = optim.Rprop()
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'previous', 'size')
    """

    elementwise = True
    rate: Rate = 1.0  # the learning rate, a number or a schedule
    start: StartValue = 0.01  # of the step sizes
    shrink: UnitInterval = 0.5  # of a step after a change of sign
    grow: NonNegative = 1.2  # of a step without one
    min_size: NonNegative = 1e-6  # of a step
    max_size: NonNegative = 50.0  # of a step

    def leaf_slots(self, path, w):
        return {"previous": Slot(), "size": Slot(start=self.start, wide=True)}

    def leaf_update(self, now, g, w, slots):
        agreement = lax.sign(g) * lax.sign(slots["previous"])
        factor = jnp.where(agreement > 0, jnp.full_like(g, now.grow), jnp.ones_like(g))
        factor = jnp.where(agreement < 0, jnp.full_like(g, now.shrink), factor)
        size = jnp.clip(slots["size"] * factor, jnp.full_like(g, now.min_size), jnp.full_like(g, now.max_size))
        g = jnp.where(agreement < 0, jnp.zeros_like(g), g)
        return w - now.rate * size * lax.sign(g), {"previous": g, "size": size}
