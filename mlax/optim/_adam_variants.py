"""Further members of the Adam family: Adamax, Yogi, NAdamW, ADOPT and Adan."""

import jax.numpy as jnp
from jax import lax

from mlax.core import frozen
from mlax.optim._adam import Adam, AdamW, adam_direction, adam_moments
from mlax.optim._hyperparams import Beta, NonNegative, Patterns, Rate, StartValue
from mlax.optim._leafwise import Leafwise
from mlax.optim._slots import Slot
from mlax.optim._trees import moving_average


@frozen
class Adamax(Adam):
    """Adamax: Adam with the decayed maximum of `|g| + eps` in place of the root of the mean square.

    Algorithm 2 of https://arxiv.org/abs/1412.6980. Slots: mean, peak.

    >>> optimizer = optim.Adamax(2e-3)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'peak')
    """

    def leaf_slots(self, path, w):
        return {"mean": Slot(), "peak": Slot(wide=True)}

    def leaf_update(self, now, g, w, slots):
        mean = moving_average(slots["mean"], g, now.b1)
        peak = lax.max(now.b2 * slots["peak"], lax.abs(g) + now.eps)
        step = mean * now.bias_correction(now.b1) / jnp.where(peak > 0, peak, jnp.ones_like(peak))
        return w - now.rate * step, {"mean": mean, "peak": peak}


@frozen
class Yogi(Adam):
    """Yogi: Adam whose mean square moves by `(1 - b2) * g * g` towards `g * g`, and so decreases slowly.

    The mean square starts at `start`. Algorithm 2 of
    https://papers.nips.cc/paper/8186-adaptive-methods-for-nonconvex-optimization, with Adam's bias correction.
    Slots: mean, square.

    >>> optimizer = optim.Yogi(1e-2)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'square')
    """

    eps: NonNegative = 1e-3  # added to the denominator
    start: StartValue = 1e-6  # of the mean of squares

    def leaf_slots(self, path, w):
        return {"mean": Slot(), "square": Slot(start=self.start, wide=True)}

    def leaf_update(self, now, g, w, slots):
        mean = moving_average(slots["mean"], g, now.b1)
        square = slots["square"] + (1 - now.b2) * lax.sign(g * g - slots["square"]) * g * g
        return w - now.rate * adam_direction(now, mean, square), {"mean": mean, "square": square}


@frozen
class NAdamW(AdamW):
    """NAdamW, AdamW with Nesterov momentum: the step uses `b1 * mean + (1 - b1) * g`, each with its bias correction.

    Algorithm 8 of https://cs229.stanford.edu/proj2015/054_report.pdf with a constant momentum, and the weight decay of
    AdamW. `NAdam` has the momentum schedule of that report instead. Slots: mean, square.

    >>> optimizer = optim.NAdamW(1e-3, decay=0.01)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'square')
    """

    def leaf_update(self, now, g, w, slots):
        moments = adam_moments(now, g, slots)
        mean_factor, square_factor = now.bias_corrections(now.b1, now.b2)
        ahead = now.b1 * moments["mean"] * now.bias_correction(now.b1, ahead=1)
        mean = ahead + (1 - now.b1) * g * mean_factor
        root = lax.sqrt(moments["square"] * square_factor)
        return w - now.rate * now.add_decay(mean / now.add_eps(root), w), moments


@frozen
class ADOPT(Leafwise):
    """ADOPT: AdamW that divides each gradient by the mean square before it, and averages the quotients.

    The quotients are clipped to the fourth root of the step; the first gradient only initializes the mean square.
    Algorithm 2 of https://arxiv.org/abs/2411.02853. `decayed` as in `AdamW`. Slots: mean, square.

    >>> optimizer = optim.ADOPT(1e-3)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'square')
    """

    elementwise = True
    rate: Rate  # the learning rate, a number or a schedule
    b1: Beta = 0.9  # the decay rate of the mean of gradients
    b2: Beta = 0.9999  # the decay rate of the mean of squares
    eps: NonNegative = 1e-6  # added to the denominator
    decay: NonNegative = 0.0  # the weight decay
    decayed: Patterns | None = None  # patterns of the leaves to decay; None: those named kernel or table

    def leaf_slots(self, path, w):
        return {"mean": Slot(), "square": Slot(wide=True)}

    def leaf_update(self, now, g, w, slots):
        first = now.step == 0
        limit = jnp.sqrt(jnp.sqrt(now.t - 1)).astype(g.dtype)
        root = lax.max(lax.sqrt(slots["square"]), jnp.full_like(g, now.eps))
        scaled = lax.clamp(-limit, g / jnp.where(root > 0, root, jnp.ones_like(root)), limit)
        mean = moving_average(slots["mean"], scaled, now.b1)  # stays 0 in the first step, whose limit is 0
        square = jnp.where(first, g * g, moving_average(slots["square"], g * g, now.b2))
        return jnp.where(first, w, w - now.rate * now.add_decay(mean, w)), {"mean": mean, "square": square}


@frozen
class Adan(Leafwise):
    """Adan: Nesterov momentum in Adam by moving averages of the gradient and of its change from step to step.

    With `change = g - previous`, the step is `mean + b2 * trend` over the root of the mean square of
    `g + b2 * change`, all bias-corrected. Weight decay is implicit: the new weights are divided by
    `1 + rate * decay`. Algorithm 1 of https://arxiv.org/abs/2208.06677, whose betas are one minus these.
    `decayed` as in `AdamW`. Slots: mean, trend, square, previous.

    >>> optimizer = optim.Adan(1e-3)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'trend', 'square', 'previous')
    """

    elementwise = True
    rate: Rate  # the learning rate, a number or a schedule
    b1: Beta = 0.98  # the decay rate of the mean of gradients
    b2: Beta = 0.92  # the decay rate of the mean of changes
    b3: Beta = 0.99  # the decay rate of the mean of squares
    eps: NonNegative = 1e-8  # added to the denominator
    decay: NonNegative = 0.02  # the weight decay
    decayed: Patterns | None = None  # patterns of the leaves to decay; None: those named kernel or table

    def leaf_slots(self, path, w):
        return {"mean": Slot(), "trend": Slot(), "square": Slot(wide=True), "previous": Slot()}

    def leaf_update(self, now, g, w, slots):
        change = jnp.where(now.step == 0, jnp.zeros_like(g), g - slots["previous"])
        ahead = g + now.b2 * change
        mean = moving_average(slots["mean"], g, now.b1)
        trend = moving_average(slots["trend"], change, now.b2)
        square = moving_average(slots["square"], ahead * ahead, now.b3)
        mean_factor, trend_factor, square_factor = now.bias_corrections(now.b1, now.b2, now.b3)
        step = mean * mean_factor + now.b2 * trend * trend_factor
        step = step / now.add_eps(lax.sqrt(square * square_factor))
        new = (w - now.rate * step) / (1 + now.rate * now.decay)
        return new, {"mean": mean, "trend": trend, "square": square, "previous": g}
