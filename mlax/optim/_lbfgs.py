"""LBFGS: Newton's method with a curvature remembered from the last steps."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlax._jax import tree_vdot
from mlax.core import DType, frozen
from mlax.optim._base import ByPath, Optimizer, StepResult
from mlax.optim._hyperparams import Beta, Rate
from mlax.optim._rounding import Rounding, RoundToNearest
from mlax.optim._slot_layout import LeafPolicy
from mlax.optim._slots import Slot

Leaf = dict[str, jax.Array]


@frozen
class LBFGS(Optimizer):
    """A step along the gradient times an inverse curvature, which the last `history` steps tell.

    Its length is found by a line search of at most `search` evaluations, for which `update` needs the loss:
    `update(grads, state, trainables, value=value, loss=loss)`; it ends where the loss falls by `decrease` and its
    slope to `slope` of what the first slope promised. With `search=0` it is `rate`. Gradients should be exact, of the
    whole problem and not of a batch. Slots: steps and changes, of weights and gradients, (history, ...); gradient and
    move, the last ones. Algorithm 7.5 of Nocedal and Wright, Numerical Optimization, 2006; the search, by bisection,
    is that of https://doi.org/10.1007/s10107-012-0514-2
    """

    rate: Rate = 1.0
    history: int = 10
    search: int = 30
    decrease: Beta = 1e-4
    slope: Beta = 0.9
    accum_dtype: DType = dataclasses.field(default=None, kw_only=True)
    slot_dtypes: tuple[tuple[str, str], ...] = dataclasses.field(default=(), kw_only=True)
    rounding: Rounding = dataclasses.field(default=RoundToNearest(), kw_only=True)

    def policy(self, path):
        return LeafPolicy(self.accum_dtype, self.slot_dtypes, self.rounding)

    def slots(self, path, w):
        several = Slot((None, *range(len(w.shape))), (self.history,))
        return {"steps": several, "changes": several, "gradient": Slot(), "move": Slot()}

    def advance(self, now, grads, weights, slots):
        steps, changes = self._remembered(now, grads, slots)
        way = _direction(grads, steps, changes)
        slope = tree_vdot(way, grads)
        downhill = slope < 0  # rounding, or a loss that changes, can spoil the memory
        way = {path: jnp.where(downhill, leaf, -grads[path]) for path, leaf in way.items()}
        slope = jnp.where(downhill, slope, -tree_vdot(grads, grads))
        length = self._length(now, weights, way, slope)
        move = {path: length.astype(leaf.dtype) * leaf for path, leaf in way.items()}
        after = {"step": slots["step"], "steps": steps, "changes": changes, "gradient": dict(grads), "move": move}
        return StepResult({path: weights[path] + leaf for path, leaf in move.items()}, after)

    def _remembered(self, now: Any, grads: ByPath, slots: Mapping[str, Any]) -> tuple[Leaf, Leaf]:
        """The memory with the last step in it, the newest first, unless its curvature was not positive."""
        change = {path: g - slots["gradient"][path] for path, g in grads.items()}
        move = {path: slots["move"][path] for path in grads}
        bend, size = tree_vdot(move, change), tree_vdot(change, change)
        useful = (now.step > 0) & (bend > 1e-10 * size) & (bend > 0)

        def pushed(old: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(useful, jnp.concatenate([new[None], old[:-1]]), old)

        return (
            {path: pushed(slots["steps"][path], leaf) for path, leaf in move.items()},
            {path: pushed(slots["changes"][path], leaf) for path, leaf in change.items()},
        )

    def _length(self, now: Any, weights: ByPath, way: Leaf, slope: jax.Array) -> jax.Array:
        numbers = now.numbers(self)
        first = jnp.asarray(numbers["rate"]).astype(slope.dtype)
        if self.search == 0:
            return first
        if now.evaluate is None:
            raise TypeError("LBFGS: update needs the loss for its line search: update(..., loss=loss), or search=0.")
        evaluate: Callable[[Any], Any] = now.evaluate

        def at(length: jax.Array) -> tuple[jax.Array, jax.Array]:
            there = {path: weights[path] + length.astype(leaf.dtype) * leaf for path, leaf in way.items()}
            value, grads = evaluate(there)
            return value.astype(slope.dtype), tree_vdot(grads, way)

        # before anything is known of the curvature, a step no longer than 1
        first = jnp.where(now.step == 0, jnp.minimum(first, 1 / jnp.sqrt(tree_vdot(way, way) + 1e-30)), first)
        start = now.value.astype(slope.dtype) if now.value is not None else at(jnp.zeros_like(slope))[0]
        return _line_search(at, start, slope, first, self.search, numbers["decrease"], numbers["slope"])


def _line_search(
    at: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    start: jax.Array,
    slope: jax.Array,
    first: jax.Array,
    most: int,
    decrease: Any,
    flatter: Any,
) -> jax.Array:
    """A length where the loss has fallen enough and the slope is flat enough; or the best one seen; or zero."""

    def going(carry: Any) -> Any:
        _, _, _, _, _, count, done = carry
        return (count < most) & ~done

    def halve(carry: Any) -> Any:
        length, low, high, best, best_value, count, _ = carry
        value, here = at(length)
        fell = value <= start + decrease * length * slope  # false where the loss is not a number
        flat = here >= flatter * slope
        better = fell & (value < best_value)
        best, best_value = jnp.where(better, length, best), jnp.where(better, value, best_value)
        low, high = jnp.where(fell & ~flat, length, low), jnp.where(fell, high, length)
        after = jnp.where(jnp.isfinite(high), (low + high) / 2, 2 * length)
        done = fell & flat
        return jnp.where(done, length, after), low, high, best, best_value, count + 1, done

    zero = jnp.zeros_like(slope)
    carry = first, zero, jnp.full_like(slope, jnp.inf), zero, start, jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    length, _, _, best, _, _, done = lax.while_loop(going, halve, carry)
    return jnp.where(done, length, best)


def _direction(grads: ByPath, steps: Leaf, changes: Leaf) -> Leaf:
    """Minus the inverse curvature times the gradient: the two loops, from the newest step to the oldest and back."""

    def down(way: Leaf, pair: tuple[Leaf, Leaf]) -> tuple[Leaf, jax.Array]:
        step, change = pair
        part = _safe_divide(tree_vdot(step, way), tree_vdot(step, change))
        return {path: leaf - part.astype(leaf.dtype) * change[path] for path, leaf in way.items()}, part

    def up(way: Leaf, pair: tuple[Leaf, Leaf, jax.Array]) -> tuple[Leaf, None]:
        step, change, part = pair
        part = part - _safe_divide(tree_vdot(change, way), tree_vdot(step, change))
        return {path: leaf + part.astype(leaf.dtype) * step[path] for path, leaf in way.items()}, None

    way, parts = lax.scan(down, dict(grads), (steps, changes))
    step, change = ({path: leaf[0] for path, leaf in leaves.items()} for leaves in (steps, changes))
    bend, size = tree_vdot(step, change), tree_vdot(change, change)
    scale = jnp.where(size > 0, _safe_divide(bend, size), 1.0)
    way = {path: scale.astype(leaf.dtype) * leaf for path, leaf in way.items()}
    way, _ = lax.scan(up, way, (steps, changes, parts), reverse=True)
    return {path: -leaf for path, leaf in way.items()}


def _safe_divide(above: jax.Array, below: jax.Array) -> jax.Array:
    """The quotient, and zero where nothing is remembered."""
    return jnp.where(below > 0, above / jnp.where(below > 0, below, 1.0), 0.0)
