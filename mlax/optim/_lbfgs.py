"""LBFGS: a quasi-Newton method with an inverse Hessian approximated from the last steps, and a line search."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlax._jax import cast_scalar, tree_vdot
from mlax.core import DType, frozen
from mlax.optim._base import LeavesByPath, Optimizer, StepResult
from mlax.optim._hyperparams import Count, PositiveCount, Rate, SlotDTypes, UnitInterval
from mlax.optim._rounding import LeafPolicy, Rounding, RoundToNearest
from mlax.optim._slots import Slot
from mlax.optim._update import UpdateContext

Arrays = dict[str, jax.Array]  # by path


@frozen
class LBFGS(Optimizer):
    """L-BFGS: a step along minus the gradient times an inverse Hessian, approximated from the last `history` steps.

    Its length is `rate` with `max_search_steps=0`. Otherwise a line search of at most that many evaluations finds it,
    for which `update` needs the loss: `update(grads, state, trainables, value=value, loss=loss)`. The search satisfies
    the weak Wolfe conditions, with `c1` for sufficient decrease and `c2` for the curvature. Gradients should be exact,
    of the full problem instead of a batch. Algorithm 7.5 of Nocedal and Wright, Numerical Optimization, 2006; the line
    search, by bisection, is Algorithm 2.6 of https://doi.org/10.1007/s10107-012-0514-2. Slots: steps and changes, past
    differences of weights and gradients, (history, ...); gradient and move, the last gradient and step.

    >>> optimizer = optim.LBFGS(history=5)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'steps', 'changes', 'gradient', 'move')
    """

    rate: Rate = 1.0  # the learning rate, a number or a schedule
    history: PositiveCount = 10  # pairs of steps and gradients to keep
    max_search_steps: Count = 30  # of the line search
    c1: UnitInterval = 1e-4  # of the Wolfe conditions: the least decrease
    c2: UnitInterval = 0.9  # of the Wolfe conditions: the least change of slope
    accum_dtype: DType = dataclasses.field(default=None, kw_only=True)  # of the update; None: at least float32
    slot_dtypes: SlotDTypes = dataclasses.field(default=(), kw_only=True)  # such as (("mean", "float32"),)
    rounding: Rounding = dataclasses.field(default=RoundToNearest(), kw_only=True)  # how narrow weights are stored

    def policy(self, path):
        return LeafPolicy(self.accum_dtype, self.slot_dtypes, self.rounding)

    def override_error(self, name):
        unused = name in ("c1", "c2") and self.max_search_steps == 0
        return super().override_error(name) or "there is no line search with max_search_steps=0; raise it." * unused

    def slots(self, path, w):
        stack = Slot((None, *range(len(w.shape))), (self.history,))
        return {"steps": stack, "changes": stack, "gradient": Slot(), "move": Slot()}

    def update_leaves(self, context, grads, weights, slots):
        steps, changes = self._extend_history(context, grads, slots)
        direction = _direction(grads, steps, changes)
        slope = tree_vdot(direction, grads)
        descends = slope < 0  # rounding, or a loss that changes, can corrupt the history
        direction = {path: jnp.where(descends, leaf, -grads[path]) for path, leaf in direction.items()}
        slope = jnp.where(descends, slope, -tree_vdot(grads, grads))
        length = self._step_length(context, weights, direction, slope)
        move = {path: length.astype(leaf.dtype) * leaf for path, leaf in direction.items()}
        new_slots = {"step": slots["step"], "steps": steps, "changes": changes, "gradient": dict(grads), "move": move}
        return StepResult({path: weights[path] + leaf for path, leaf in move.items()}, new_slots)

    def _extend_history(
        self, context: UpdateContext, grads: LeavesByPath, slots: Mapping[str, Any]
    ) -> tuple[Arrays, Arrays]:
        """The history with the last step in front, unless its curvature was not positive."""
        change = {path: g - slots["gradient"][path] for path, g in grads.items()}
        move = {path: slots["move"][path] for path in grads}
        curvature, size = tree_vdot(move, change), tree_vdot(change, change)
        usable = (context.step > 0) & (curvature > 1e-10 * size) & (curvature > 0)

        def push(old: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(usable, jnp.concatenate([new[None], old[:-1]]), old)

        return (
            {path: push(slots["steps"][path], leaf) for path, leaf in move.items()},
            {path: push(slots["changes"][path], leaf) for path, leaf in change.items()},
        )

    def _step_length(
        self, context: UpdateContext, weights: LeavesByPath, direction: Arrays, slope: jax.Array
    ) -> jax.Array:
        values = context.hyperparams(self)
        first = jnp.asarray(values["rate"]).astype(slope.dtype)
        if self.max_search_steps == 0:
            return first
        if context.evaluate is None:
            raise TypeError(
                "LBFGS: update needs the loss for its line search: update(..., loss=loss), or max_search_steps=0."
            )
        evaluate: Callable[[Any], Any] = context.evaluate

        def value_and_slope(length: jax.Array) -> tuple[jax.Array, jax.Array]:
            moved = {path: weights[path] + length.astype(leaf.dtype) * leaf for path, leaf in direction.items()}
            value, grads = evaluate(moved)
            return value.astype(slope.dtype), tree_vdot(direction, grads)  # the loss may have other leaves, too

        # while nothing is known of the curvature, a step of at most norm 1
        unit = 1 / jnp.sqrt(tree_vdot(direction, direction) + 1e-30)
        first = jnp.where(context.step == 0, jnp.minimum(first, unit), first)
        known = context.value is not None
        start = context.loss_value(slope.dtype) if known else value_and_slope(jnp.zeros_like(slope))[0]
        c1, c2 = (cast_scalar(values[name], slope) for name in ("c1", "c2"))
        return _line_search(value_and_slope, start, slope, first, self.max_search_steps, c1, c2)


def _line_search(
    value_and_slope: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    start: jax.Array,
    slope: jax.Array,
    first: jax.Array,
    max_steps: int,
    c1: jax.Array,
    c2: jax.Array,
) -> jax.Array:
    """A length that satisfies the weak Wolfe conditions; else the best one evaluated; else zero."""

    def searching(carry: Any) -> Any:
        _, _, _, _, _, count, done = carry
        return (count < max_steps) & ~done

    def bisect(carry: Any) -> Any:
        length, low, high, best, best_value, count, _ = carry
        value, new_slope = value_and_slope(length)
        decreases = value <= start + c1 * length * slope  # false if the loss is NaN
        flattens = new_slope >= c2 * slope
        better = decreases & (value < best_value)
        best, best_value = jnp.where(better, length, best), jnp.where(better, value, best_value)
        low, high = jnp.where(decreases & ~flattens, length, low), jnp.where(decreases, high, length)
        next_length = jnp.where(jnp.isfinite(high), (low + high) / 2, 2 * length)
        done = decreases & flattens
        return jnp.where(done, length, next_length), low, high, best, best_value, count + 1, done

    zero = jnp.zeros_like(slope)
    carry = first, zero, jnp.full_like(slope, jnp.inf), zero, start, jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    length, _, _, best, _, _, done = lax.while_loop(searching, bisect, carry)
    return jnp.where(done, length, best)


def _direction(grads: LeavesByPath, steps: Arrays, changes: Arrays) -> Arrays:
    """Minus the inverse Hessian times the gradient: the two-loop recursion, Algorithm 7.4 of Nocedal and Wright."""

    def newest_to_oldest(q: Arrays, pair: tuple[Arrays, Arrays]) -> tuple[Arrays, jax.Array]:
        step, change = pair
        alpha = _safe_divide(tree_vdot(step, q), tree_vdot(step, change))
        return {path: leaf - alpha.astype(leaf.dtype) * change[path] for path, leaf in q.items()}, alpha

    def oldest_to_newest(r: Arrays, triple: tuple[Arrays, Arrays, jax.Array]) -> tuple[Arrays, None]:
        step, change, alpha = triple
        factor = alpha - _safe_divide(tree_vdot(change, r), tree_vdot(step, change))
        return {path: leaf + factor.astype(leaf.dtype) * step[path] for path, leaf in r.items()}, None

    q, alphas = lax.scan(newest_to_oldest, dict(grads), (steps, changes))
    step, change = ({path: leaf[0] for path, leaf in leaves.items()} for leaves in (steps, changes))
    curvature, size = tree_vdot(step, change), tree_vdot(change, change)
    scale = jnp.where(size > 0, _safe_divide(curvature, size), 1.0)
    r = {path: scale.astype(leaf.dtype) * leaf for path, leaf in q.items()}
    r, _ = lax.scan(oldest_to_newest, r, (steps, changes, alphas), reverse=True)
    return {path: -leaf for path, leaf in r.items()}


def _safe_divide(above: jax.Array, below: jax.Array) -> jax.Array:
    """`above / below`, and zero where `below` is not positive, as in an empty history."""
    return jnp.where(below > 0, above / jnp.where(below > 0, below, 1.0), 0.0)
