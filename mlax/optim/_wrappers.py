"""OptimizerWrapper, and the wrappers Accumulate, Decay, Plateau, SAM and SkipNonFinite."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from mlax._jax import cast_scalar, count_non_finite, global_norm
from mlax.core import DType, frozen, short_repr
from mlax.optim._base import Optimizer, StepResult, check_wrappable
from mlax.optim._hyperparams import (
    Count,
    NonNegative,
    Patterns,
    PositiveCount,
    UnitInterval,
    check_decayed,
    matches_any,
)
from mlax.optim._slots import Slot
from mlax.optim._update import UpdateContext


@frozen
class OptimizerWrapper(Optimizer):
    """An optimizer that transforms the gradients or the result of another, and may add slots and scalars.

    The slots of the inner optimizer keep their names.
    """

    keeps_bounds: ClassVar[bool] = False  # whether leaves that are bounded inside (`is_bounded`) still are
    optimizer: Optimizer  # the optimizer inside

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wrappable(self, self.optimizer)

    def extra_slots(self, path: str, w: Any) -> dict[str, Slot]:
        """The slots of a leaf that the wrapper adds."""
        return {}

    def extra_scalars(self) -> dict[str, float | int]:
        """The scalars that the wrapper adds."""
        return {}

    def inner_optimizers(self):
        return (self.optimizer,)

    def slots(self, path, w):
        return self._merge("slot", self.optimizer.slots(path, w), self.extra_slots(path, w))

    def scalars(self):
        return self._merge("scalar", self.optimizer.scalars(), self.extra_scalars())

    def policy(self, path):
        return self.optimizer.policy(path)

    def patterns(self):
        return self.optimizer.patterns()

    def is_frozen(self, path):
        return self.optimizer.is_frozen(path)

    def is_bounded(self, path):
        return self.keeps_bounds and self.optimizer.is_bounded(path)

    def update_leaves(self, context, grads, weights, slots):
        return self.optimizer.update_leaves(context, grads, weights, slots)

    def eval_weights(self, path, w, slots, step):
        return self.optimizer.eval_weights(path, w, slots, step)

    def estimate_leaf(self, step, path, g, slots, examples):
        return self.optimizer.estimate_leaf(step, path, g, slots, examples)

    def _merge(self, kind: str, inner: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        both = inner.keys() & extra.keys()
        if both:
            raise ValueError(
                f"{type(self).__name__}: {short_repr(self.optimizer)} inside has a {kind} {min(both)!r} already; "
                "wrap it in only one of the two."
            )
        return {**inner, **extra}


@frozen
class Accumulate(OptimizerWrapper):
    """Gradient accumulation: take a step with the mean of `every` gradients; in between nothing else changes.

    Schedules inside count the steps that are taken. Slot: gathered, the sum of the gradients, in `dtype`.

    >>> optimizer = optim.Accumulate(optim.AdamW(3e-4), every=8)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'square', 'gathered')
    """

    elementwise = True
    every: PositiveCount = 1  # how many gradients an update averages
    dtype: DType = None  # None: that of the weights, or float32 if that is narrower

    def extra_slots(self, path, w):
        return {"gathered": Slot(dtype=self.dtype, wide=True)}

    def eval_weights(self, path, w, slots, step):
        return self.optimizer.eval_weights(path, w, slots, step // self.every)

    def average_weight(self, context, path):
        weight = self.optimizer.average_weight(self._inner_context(context), path)
        return None if weight is None else jnp.where(self._is_due(context), weight, jnp.zeros_like(weight))

    def estimate_every(self):
        every = self.optimizer.estimate_every()
        return None if every is None else every * self.every

    def estimate_leaf(self, step, path, g, slots, examples):
        return self.optimizer.estimate_leaf(step // self.every, path, g, slots, examples)

    def learning_rates(self, context, before, after):
        return self.optimizer.learning_rates(self._inner_context(context), before, after)

    def _inner_context(self, context: UpdateContext) -> UpdateContext:
        return dataclasses.replace(context, step=context.step // self.every, shared_step=True)

    def _is_due(self, context: UpdateContext) -> jax.Array:
        return context.step % self.every == self.every - 1

    def update_leaves(self, context, grads, weights, slots):
        sums = {path: slots["gathered"][path] + g for path, g in grads.items()}
        inner = {name: slot for name, slot in slots.items() if name != "gathered"}
        inner_context = self._inner_context(context)
        if context.chunked:
            inner_context = dataclasses.replace(inner_context, global_sum=_reject_global_sum)

        def take_step() -> tuple[Any, Any, Any]:
            means = {path: g * (1 / self.every) for path, g in sums.items()}
            step = {**inner, "step": inner_context.step + 1}
            new, new_slots = self.optimizer.update_leaves(inner_context, means, weights, step)
            new_slots = {
                name: {**slot, **new_slots[name]} if isinstance(slot, dict) else new_slots[name]
                for name, slot in inner.items()
            }
            zeros = {path: Slot().init_value(g, g.dtype) for path, g in sums.items()}  # sharded as they are
            return {**weights, **new}, {**new_slots, "step": slots["step"]}, zeros

        def skip_step() -> tuple[Any, Any, Any]:
            return dict(weights), inner, sums

        due = self._is_due(context)
        new, new_slots, sums = lax.cond(due, take_step, skip_step)
        return StepResult(new, {**new_slots, "gathered": sums})


def _reject_global_sum(amount: jax.Array) -> jax.Array:
    raise ValueError(
        "Accumulate: an optimizer inside sums over all leaves (ClipGlobalNorm, say), which is not possible inside a "
        "`lax.cond` while leaves are in host memory; wrap Accumulate in it, or use train.step(accumulate=...)."
    )


@frozen
class Decay(OptimizerWrapper):
    """Weight decay: subtract `decay * w` from the weights after each step or, if `coupled` (L2 regularization), add it
    to the gradient.

    It is not multiplied by the rate, which only the optimizer inside knows. It applies to leaves that match `decayed`;
    without patterns, to those named kernel or table. Section 2 of https://arxiv.org/abs/1711.05101

    >>> optimizer = optim.Decay(optim.SGD(0.1, momentum=0.9), decay=5e-4, decayed=("**/kernel",), coupled=True)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'momentum')
    """

    elementwise = True
    decay: NonNegative = 1e-4  # the weight decay
    decayed: Patterns | None = None  # patterns of the leaves to decay; None: those named kernel or table
    coupled: bool = False  # whether it is added to the gradient (L2 regularization)

    def patterns(self):
        return (*(self.decayed or ()), *self.optimizer.patterns())

    def check_paths(self, paths):
        super().check_paths(paths)
        check_decayed(self, paths)

    def update_leaves(self, context, grads, weights, slots):
        decay = context.hyperparams(self)["decay"]
        decays = {
            path: cast_scalar(decay, weights[path]) * weights[path] for path in grads if matches_any(self.decayed, path)
        }
        if self.coupled:
            grads = {**grads, **{path: grads[path] + term for path, term in decays.items()}}
            return self.optimizer.update_leaves(context, grads, weights, slots)
        new, new_slots = self.optimizer.update_leaves(context, grads, weights, slots)
        return StepResult({**new, **{p: new[p] - term for p, term in decays.items() if p in new}}, new_slots)


@frozen
class Plateau(OptimizerWrapper):
    """Reduce the learning rate on a plateau: multiply it by `factor` whenever `value`, passed to `update`, has not
    improved for `patience` steps.

    An improvement is a decrease below the best value by more than the fraction `threshold` of its size. The `cooldown`
    steps after each reduction do not count, whether the value improves or not; the total factor is at least
    `min_scale`. With `every` above 1, the mean value of that many updates is compared.
    Scalars: best, gathered_value, waited, scale.

    >>> optimizer, trainables = optim.Plateau(optim.SGD(0.1), factor=0.1, patience=10), {"kernel": jnp.ones((4, 3))}
    >>> state = optimizer.init(trainables)
    >>> trainables, state = optimizer.update(trainables, state, trainables, value=jnp.float32(0.7))  # the loss
    """

    elementwise = True
    factor: UnitInterval = 0.1  # of the rate, at a plateau
    patience: Count = 10  # steps without an improvement
    threshold: NonNegative = 1e-4  # the relative improvement that counts
    cooldown: Count = 0  # steps that do not count after a reduction
    every: PositiveCount = 1  # updates whose values are averaged
    min_scale: UnitInterval = 0.0  # the least total factor

    def extra_scalars(self):
        return {"best": float("inf"), "gathered_value": 0.0, "waited": 0, "scale": 1.0}

    def update_leaves(self, context, grads, weights, slots):
        if context.value is None:
            raise TypeError("Plateau: update needs the loss that it monitors: update(..., value=loss).")
        inner = {name: slot for name, slot in slots.items() if name not in self.extra_scalars()}
        best, waited, scale = slots["best"], slots["waited"], slots["scale"]
        values = {name: cast_scalar(value, best) for name, value in context.hyperparams(self).items()}
        gathered = slots["gathered_value"] + context.loss_value(best.dtype)
        due = context.step % self.every == self.every - 1
        value = gathered / self.every
        least = jnp.where(jnp.isfinite(best), values["threshold"] * abs(best), 0.0)  # a fraction of infinity is NaN
        better = due & (value < best - least)
        waited = jnp.where(better & (waited >= 0), 0, waited + due.astype(jnp.int32))  # below 0 it cools down
        reduces = waited > self.patience
        scale = jnp.where(reduces, jnp.maximum(scale * values["factor"], values["min_scale"]), scale)
        context = context.scale_rates(dict.fromkeys(grads, scale))
        new, new_slots = self.optimizer.update_leaves(context, grads, weights, inner)
        scalars = {
            "best": jnp.where(better, value, best),
            "gathered_value": jnp.where(due, jnp.zeros_like(gathered), gathered),
            "waited": jnp.where(reduces, -self.cooldown, waited),
            "scale": scale,
        }
        return StepResult(new, {**new_slots, **scalars})

    def learning_rates(self, context, before, after):
        scale, rates = after["scale"], self.optimizer.learning_rates(context, before, after)
        return {name: scale * cast_scalar(rate, scale) for name, rate in rates.items()}


@frozen
class SAM(OptimizerWrapper):
    """Sharpness-aware minimisation: use the gradient at `w + radius * g / |g|` in place of `g`.

    It needs a second gradient, and so the loss: `update(grads, state, trainables, loss=function of the trainables)`.
    Algorithm 1 of https://arxiv.org/abs/2010.01412

    >>> optimizer = optim.SAM(optim.SGD(0.1), radius=0.05)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step',)
    """

    radius: NonNegative = 0.05  # of the ascent step

    def update_leaves(self, context, grads, weights, slots):
        if context.evaluate is None:
            raise TypeError("SAM: update needs the loss, for a second gradient: update(..., loss=loss).")
        size = global_norm(grads)
        scale = cast_scalar(context.hyperparams(self)["radius"], size) / (size + 1e-12)
        _, perturbed = context.evaluate({path: weights[path] + scale.astype(g.dtype) * g for path, g in grads.items()})
        return self.optimizer.update_leaves(context, {path: perturbed[path] for path in grads}, weights, slots)


@frozen
class SkipNonFinite(OptimizerWrapper):
    """Skip updates with NaN or infinite gradients: weights, slots and step stay unchanged. Scalar: skipped, counts such
    updates.

    Inside `Groups` or `Accumulate`, which go on counting, it holds back the step of the optimizer inside only.

    >>> optimizer = optim.SkipNonFinite(optim.AdamW(3e-4))
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'square', 'skipped')
    """

    elementwise = True  # except for the count, which goes through `context.global_sum`

    def extra_scalars(self):
        return {"skipped": 0}

    def update_leaves(self, context, grads, weights, slots):
        step = context.step - slots["skipped"] if context.shared_step else context.step
        inner = {**{name: slot for name, slot in slots.items() if name != "skipped"}, "step": step + 1}
        finite = context.global_sum(count_non_finite(grads)) == 0
        inner_context = dataclasses.replace(context, step=step)
        new, new_slots = self.optimizer.update_leaves(inner_context, grads, weights, inner)
        before = {**inner, "step": step}

        def select(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(finite, new, old.astype(new.dtype))

        selected = {
            name: {path: select(leaf, before[name][path]) for path, leaf in slot.items()}
            if isinstance(slot, dict)
            else select(slot, before[name])
            for name, slot in new_slots.items()
        }
        if context.shared_step:
            selected["step"] = slots["step"]
        skipped = slots["skipped"] + (~finite).astype(jnp.int32)
        return StepResult({path: select(w, weights[path]) for path, w in new.items()}, {**selected, "skipped": skipped})
