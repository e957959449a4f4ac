"""Prodigy: AdamW that estimates its learning rate."""

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax

from mlax._jax import cast_scalar, tree_vdot, widest_dtype
from mlax.core import frozen
from mlax.optim._base import LeavesByPath
from mlax.optim._hyperparams import TINY, Beta, Hyperparams, NonNegative, Patterns, Range, Rate
from mlax.optim._leafwise import Leafwise
from mlax.optim._slots import Slot
from mlax.optim._trees import moving_average
from mlax.optim._update import UpdateContext


@frozen
class Prodigy(Leafwise):
    """Prodigy: AdamW with a learning rate of `rate * distance`, where `distance` estimates how far the solution is.

    Leave `rate` at 1, or make it a schedule from 1 to 0. The estimate starts at `start`, never decreases, and is scaled
    by `factor`. Algorithm 4 of https://arxiv.org/abs/2306.06101, with the bias correction of the authors' code; with
    `safeguard_warmup` the rate does not enter the denominator of the estimate. `decayed` as in `AdamW`.
    Slots: mean, square, gradient_sum, origin. Scalars: distance; numerator, of the estimate.

    >>> optimizer = optim.Prodigy()
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'square', 'gradient_sum', 'origin', 'distance', 'numerator')
    """

    elementwise = True  # except for two sums, which go through `context.global_sum`
    rate: Rate = 1.0  # the learning rate, a number or a schedule
    b1: Beta = 0.9  # the decay rate of the mean of gradients
    b2: Beta = 0.999  # the decay rate of the mean of squares
    b3: Beta | None = None  # None: the square root of b2
    eps: NonNegative = 1e-8  # added to the denominator
    decay: NonNegative = 0.0  # the weight decay
    decayed: Patterns | None = None  # patterns of the leaves to decay; None: those named kernel or table
    start: Annotated[float, Range(TINY)] = 1e-6  # the first estimate of the distance
    factor: NonNegative = 1.0  # of the estimate
    safeguard_warmup: bool = False  # whether the rate is left out of the estimate's denominator

    def leaf_slots(self, path, w):
        wide = Slot(wide=True)
        return {"mean": Slot(), "square": wide, "gradient_sum": wide, "origin": Slot(copy=True, wide=True)}

    def scalars(self):
        return {"distance": float(self.start), "numerator": 0.0}

    def learning_rates(self, context, before, after):
        return {"rate": before["distance"] * cast_scalar(context.hyperparams(self)["rate"], before["distance"])}

    def update_leaves(self, context, grads, weights, slots):
        now = Hyperparams(context.step, context.hyperparams(self), dtype=widest_dtype(g.dtype for g in grads.values()))
        estimate = self._estimate(now, context, grads, weights, slots)
        return super().update_leaves(context, grads, weights, {**slots, **estimate})

    def shared_values(self, now, scalars):
        return {"distance": scalars["distance"][1], "before": scalars["distance"][0], "numerator": scalars["numerator"]}

    def leaf_update(self, now, g, w, slots):
        size = self._step_size(now, now.before)
        scaled = now.before * g
        mean = moving_average(slots["mean"], scaled, now.b1)
        square = moving_average(slots["square"], scaled * scaled, now.b2)
        root = lax.sqrt(square) + now.distance * now.eps
        step = mean / jnp.where(root > 0, root, jnp.ones_like(root))
        gradient_sum = self._add_gradient(now, now.before, g, slots["gradient_sum"])
        new = {"mean": mean, "square": square, "gradient_sum": gradient_sum, "origin": slots["origin"]}
        return w - size * now.add_decay(step, w), new

    def _estimate(
        self, now: Hyperparams, context: UpdateContext, grads: LeavesByPath, weights: LeavesByPath, slots: Any
    ) -> dict[str, jax.Array]:
        """The new numerator; and the distance before this update and after it, stacked."""
        distance = slots["distance"]
        moved = {path: slots["origin"][path] - w for path, w in weights.items() if path in grads}
        size = jnp.zeros((), now.dtype)
        for path, g in grads.items():
            here = dataclasses.replace(now, dtype=g.dtype, rate_factor=context.rate_factors.get(path))
            gradient_sum = self._add_gradient(here, distance.astype(g.dtype), g, slots["gradient_sum"][path])
            size = size + jnp.sum(lax.abs(gradient_sum).astype(now.dtype))
        product, size = context.global_sum(jnp.stack([tree_vdot(grads, moved).astype(now.dtype), size]))
        weight = distance / self.start * self._step_size(now, distance)
        numerator = self._b3(now) * slots["numerator"] + weight * product
        known = size > 0
        ratio = jnp.where(known, now.factor * numerator / jnp.where(known, size, jnp.ones_like(size)), 0.0)
        return {"numerator": numerator, "distance": jnp.stack([distance, jnp.maximum(distance, ratio)])}

    def _add_gradient(self, now: Hyperparams, distance: jax.Array, g: jax.Array, gradient_sum: jax.Array) -> jax.Array:
        """The decayed sum of the scaled gradients, whose 1-norm is the denominator of the estimate."""
        size = distance if self.safeguard_warmup else self._step_size(now, distance)
        return self._b3(now) * gradient_sum + size * distance / self.start * g

    def _step_size(self, now: Hyperparams, distance: jax.Array) -> jax.Array:
        mean_factor, square_factor = now.bias_corrections(now.b1, now.b2)
        return distance * now.rate * mean_factor * lax.rsqrt(square_factor)

    def _b3(self, now: Hyperparams) -> Any:
        return now.b2**0.5 if self.b3 is None else now.b3
