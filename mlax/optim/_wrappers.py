"""OptimizerWrapper, and the wrappers Accumulate, Decay, Plateau, SAM and SkipNonFinite."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlax._jax import cast_scalar, count_non_finite, global_norm
from mlax.core import DType, frozen, short_repr
from mlax.optim._base import ByPath, Optimizer, StepResult, check_wrappable, matches_any
from mlax.optim._hyperparams import Beta, NonNegative, Patterns
from mlax.optim._slots import Slot
from mlax.optim._update import UpdateContext


@frozen
class OptimizerWrapper(Optimizer):
    """An optimizer around another, whose slots stay where they are. It may add some, by `adds`."""

    optimizer: Optimizer

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wrappable(self, self.optimizer)

    def adds(self, path: str, w: Any) -> dict[str, Slot]:
        """The slots of its own beside one leaf."""
        return {}

    def within(self):
        return (self.optimizer,)

    def adds_scalars(self) -> dict[str, float | int]:
        """The scalars of its own."""
        return {}

    def slots(self, path, w):
        return self._joined("slot", self.optimizer.slots(path, w), self.adds(path, w))

    def scalars(self):
        return self._joined("scalar", self.optimizer.scalars(), self.adds_scalars())

    def policy(self, path):
        return self.optimizer.policy(path)

    def patterns(self):
        return self.optimizer.patterns()

    def advance(self, now: UpdateContext, grads: ByPath, weights: ByPath, slots: Mapping[str, Any]) -> StepResult:
        return self.optimizer.advance(now, grads, weights, slots)

    def shows(self, path, w, slots, step):
        return self.optimizer.shows(path, w, slots, step)

    def _joined(self, kind: str, inner: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        both = inner.keys() & own.keys()
        if both:
            raise ValueError(
                f"{type(self).__name__}: {short_repr(self.optimizer)} inside has a {kind} {min(both)!r} already; "
                "put only one of the two around it."
            )
        return {**inner, **own}


@frozen
class Accumulate(OptimizerWrapper):
    """The optimizer takes a step with the mean of `every` gradients, and in between nothing moves.

    Slot: gathered, their sum, in `dtype`. The steps that schedules inside see are those that are taken.
    """

    elementwise = True
    every: int = 1
    dtype: DType = None  # None: that of the weights, or float32 if that is narrower

    def __post_init__(self):
        super().__post_init__()
        if self.every < 1:
            raise ValueError(f"Accumulate: every is {self.every}, but must be at least 1.")

    def adds(self, path, w):
        return {"gathered": Slot(dtype=self.dtype, wide=True)}

    def shows(self, path, w, slots, step):
        return self.optimizer.shows(path, w, slots, step // self.every)

    def advance(self, now, grads, weights, slots):
        gathered = {path: slots["gathered"][path] + g for path, g in grads.items()}
        inner = {name: slot for name, slot in slots.items() if name != "gathered"}
        moment = dataclasses.replace(now, step=now.step // self.every)
        if now.in_pieces:
            moment = dataclasses.replace(moment, total=_refuse_total)

        def taken(_: Any) -> tuple[Any, Any, Any]:
            means = {path: g * (1 / self.every) for path, g in gathered.items()}
            new, after = self.optimizer.advance(moment, means, weights, {**inner, "step": moment.step + 1})
            after = {
                name: {**inner[name], **after[name]} if isinstance(inner[name], dict) else after[name] for name in inner
            }
            return {**weights, **new}, {**after, "step": slots["step"]}, jax.tree.map(jnp.zeros_like, gathered)

        def waited(_: Any) -> tuple[Any, Any, Any]:
            return dict(weights), inner, gathered

        new, after, gathered = lax.cond(now.step % self.every == self.every - 1, taken, waited, None)
        return StepResult(new, {**after, "gathered": gathered})


def _refuse_total(amount: jax.Array) -> jax.Array:
    raise ValueError(
        "Accumulate: an optimizer inside adds up over all leaves (ClipGlobalNorm, say), which cannot wait for a "
        "condition while leaves are in host memory; put it around Accumulate, or take train.step(accumulate=...)."
    )


@frozen
class Decay(OptimizerWrapper):
    """`decay * w` taken off the weights at each step; or, if it is `coupled`, added to the gradient.

    Not times the rate, which the optimizer inside keeps to itself. Leaves that match a pattern of `decayed`; without
    patterns, those named kernel or table. https://arxiv.org/abs/1711.05101
    """

    elementwise = True
    decay: NonNegative = 1e-4
    decayed: Patterns | None = None
    coupled: bool = False

    def patterns(self):
        return (*(self.decayed or ()), *self.optimizer.patterns())

    def advance(self, now, grads, weights, slots):
        decay = now.numbers(self)["decay"]
        mine = [path for path in grads if matches_any(self.decayed, path)]
        off = {path: cast_scalar(decay, weights[path]) * weights[path] for path in mine}
        if self.coupled:
            return self.optimizer.advance(
                now, {**grads, **{path: grads[path] + off[path] for path in mine}}, weights, slots
            )
        new, after = self.optimizer.advance(now, grads, weights, slots)
        return StepResult({**new, **{path: new[path] - off[path] for path in mine if path in new}}, after)


@frozen
class Plateau(OptimizerWrapper):
    """The rate times `factor` each time that `value`, passed to `update`, has not improved for `patience` steps.

    To improve is to fall below the best by its part `threshold`. For `cooldown` steps after a fall nothing is counted,
    and the whole factor does not fall below `least`. Give the mean loss of `every` updates a look, not each one alone.
    Scalars: best, gathered_value, waited, scale.
    """

    elementwise = True
    factor: Beta = 0.1
    patience: int = 10
    threshold: NonNegative = 1e-4
    cooldown: int = 0
    every: int = 1
    least: NonNegative = 0.0

    def adds_scalars(self):
        return {"best": float("inf"), "gathered_value": 0.0, "waited": 0, "scale": 1.0}

    def advance(self, now, grads, weights, slots):
        if now.value is None:
            raise TypeError("Plateau: update needs the loss that it watches: update(..., value=loss).")
        numbers = now.numbers(self)
        mine = {"best", "gathered_value", "waited", "scale"}
        inner = {name: slot for name, slot in slots.items() if name not in mine}
        best, waited, scale = slots["best"], slots["waited"], slots["scale"]
        gathered = slots["gathered_value"] + jnp.asarray(now.value).astype(best.dtype)
        due = now.step % self.every == self.every - 1
        value = gathered / self.every
        better = due & (value < best * (1 - numbers["threshold"]))
        waited = jnp.where(better, jnp.minimum(waited, 0), waited + due.astype(jnp.int32))
        falls = waited > self.patience
        scale = jnp.where(falls, jnp.maximum(scale * numbers["factor"], numbers["least"]), scale)
        scaled = now.scaled(dict.fromkeys(grads, scale))
        new, after = self.optimizer.advance(scaled, grads, weights, inner)
        own = {
            "best": jnp.where(better, value, best),
            "gathered_value": jnp.where(due, jnp.zeros_like(gathered), gathered),
            "waited": jnp.where(falls, -self.cooldown, waited),
            "scale": scale,
        }
        return StepResult(new, {**after, **own})


@frozen
class SAM(OptimizerWrapper):
    """The optimizer sees the gradient at `w + radius * g / |g|`, the highest point of the neighbourhood, in place of g.

    `update` needs the loss: `update(grads, state, trainables, loss=function of the trainables)`. It costs one more
    gradient. Algorithm 1 of https://arxiv.org/abs/2010.01412
    """

    radius: NonNegative = 0.05

    def advance(self, now, grads, weights, slots):
        if now.evaluate is None:
            raise TypeError("SAM: update needs the loss, to differentiate it elsewhere: update(..., loss=loss).")
        size = global_norm(grads)
        way = cast_scalar(now.numbers(self)["radius"], size) / (size + 1e-12)
        _, worst = now.evaluate({path: weights[path] + way.astype(g.dtype) * g for path, g in grads.items()})
        return self.optimizer.advance(now, {path: worst[path] for path in grads}, weights, slots)


@frozen
class SkipNonFinite(OptimizerWrapper):
    """If any gradient holds a number that is not finite, weights, slots and step stay; `skipped` counts how often.

    Scalar: skipped.
    """

    elementwise = True  # but for the count, which `now.total` sees to

    def adds_scalars(self):
        return {"skipped": 0}

    def advance(self, now, grads, weights, slots):
        inner = {name: slot for name, slot in slots.items() if name != "skipped"}
        fine = now.total(count_non_finite(grads)) == 0
        new, after = self.optimizer.advance(now, grads, weights, inner)
        before = {**inner, "step": now.step}

        def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(fine, new, old.astype(new.dtype))

        kept = {
            name: {path: chosen(leaf, before[name][path]) for path, leaf in slot.items()}
            if isinstance(slot, dict)
            else chosen(slot, before[name])
            for name, slot in after.items()
        }
        skipped = slots["skipped"] + (~fine).astype(jnp.int32)
        return StepResult({path: chosen(w, weights[path]) for path, w in new.items()}, {**kept, "skipped": skipped})
