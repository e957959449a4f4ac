"""A scan whose weights are differentiated for all of its steps at once."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlax.core._all_steps import over_all_steps
from mlax.core._cell import added
from mlax.core._keeping import keeping_scan
from mlax.core._turned import Function, run_turned, turned

Apply = Callable[[str, Function, Any], Any]  # of (name, function, value): function(weights[name], value)


@dataclasses.dataclass(frozen=True)
class Step:
    """What is scanned: `x + feedback(weights, (carry, key))`, if there is a feedback, and then `step`."""

    feedback: Function
    step: Callable[[Apply, Any, Any, Any], tuple[Any, Any]]  # of (apply, carry, x, fixed) to (carry, y)

    def __call__(self, apply: Apply, weights: dict[str, Any], carry: Any, x: Any, fixed: Any) -> tuple[Any, Any]:
        return self.step(apply, carry, added(x, self.feedback(weights, (carry, fixed[0]))), fixed)


def deferred_scan(
    step: Step, carry: Any, xs: Any, fixed: Any, weights: dict[str, Any], *, reverse: bool = False, unroll: int = 1
) -> tuple[Any, Any]:
    """`lax.scan` of a step that uses its weights by `feedback` and `apply` alone.

    `fixed`, the keys for `feedback` first, is scanned like `xs` and has no derivative.

    JAX's own derivative of a scan adds up the weights' gradients step by step: a small product, and a pass over the
    weights, each time. This one is the same sum in another order. A change of the weights nudges what each use of
    them gives; so the nudges of all steps are one product before the scan of the derivatives, which carries on
    nothing but the carry's, and transposed, the gradient is one product after it. It is a rule for `jax.jvp`, from
    which JAX derives the backward pass; so derivatives of every order and in both directions exist.
    """

    @jax.custom_jvp
    def scan(carry: Any, xs: Any, fixed: Any, weights: dict[str, Any]) -> tuple[Any, Any]:
        def apply(name: str, function: Function, value: Any) -> Any:
            return function(weights.get(name), value)

        def body(carry: Any, now: tuple[Any, Any]) -> tuple[Any, Any]:
            x, fixed = now
            if jax.default_backend() == "cpu":
                # else XLA reads the step's slice within the loop of the gates, which takes up to twice as long
                x = lax.optimization_barrier(x)
            return step(apply, weights, carry, x, fixed)

        return lax.scan(body, carry, (xs, fixed), reverse=reverse, unroll=unroll)

    @scan.defjvp
    def derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        carry, xs, fixed, weights = primals
        dcarry, dxs, _, dweights = tangents
        uses = _uses(step, carry, xs, fixed, weights)
        times = jax.tree.leaves(xs)[0].shape[0]
        kernels = turned(weights)
        eased = dataclasses.replace(
            step, feedback=lambda weights, given: run_turned(step.feedback, weights, kernels, given)
        )

        def nudged_scan(carry: Any, xs: Any, nudges: list[Any]) -> tuple[Any, Any]:
            def body(carry: Any, now: tuple[Any, Any, list[Any]]) -> tuple[Any, Any]:
                x, fixed, nudges = now
                values: list[Any] = []

                def apply(name: str, function: Function, value: Any) -> Any:
                    if name not in weights:
                        return function(None, value)
                    y = run_turned(function, weights[name], kernels[name], value)
                    values.append(value)
                    return jax.tree.map(_nudged, y, nudges[len(values) - 1])

                after, y = eased(apply, weights, carry, x, fixed)
                return after, (y, (carry, values))

            carry, (y, kept) = keeping_scan(body, carry, (xs, fixed, nudges), reverse=reverse, unroll=unroll)
            return (carry, y), kept

        still = [jax.tree.map(lambda leaf: _zeros(times, leaf), like) for _, _, like in uses]
        out, push, (before, values) = jax.linearize(nudged_scan, carry, xs, still, has_aux=True)
        dxs = added(dxs, _nudge(step.feedback, weights, dweights, (before, fixed[0])))
        nudges = []
        for (name, function, _), value in zip(uses, values, strict=True):
            with jax.named_scope(name):
                nudges.append(_nudge(function, weights[name], dweights[name], value))
        return out, push(dcarry, dxs, nudges)

    return scan(carry, xs, fixed, weights)


def _uses(step: Step, carry: Any, xs: Any, fixed: Any, weights: dict[str, Any]) -> list[tuple[str, Function, Any]]:
    """Each `apply` of a step to weights that there are, with the type of what it gives."""
    found: list[tuple[str, Function, Any]] = []

    def apply(name: str, function: Function, value: Any) -> Any:
        y = function(weights.get(name), value)
        if name in weights:
            found.append((name, function, jax.eval_shape(lambda: y)))
        return y

    def body(carry: Any, now: tuple[Any, Any]) -> tuple[Any, Any]:
        found.clear()  # a scan may trace it twice
        return step(apply, weights, carry, *now)

    jax.eval_shape(lambda carry, now: lax.scan(body, carry, now), carry, (xs, fixed))
    return found


def _zeros(times: int, like: Any) -> jax.Array:
    """As many zeros as `like` in a stack, laid over the devices as it is."""
    return jnp.broadcast_to(jnp.zeros_like(like), (times, *like.shape))


def _nudge(function: Function, weights: Any, dweights: Any, values: Any) -> Any:
    """How `function` of each step's value changes with the weights."""

    def one(value: Any) -> Any:
        return jax.jvp(lambda weights: function(weights, value), (weights,), (dweights,))[1]

    return over_all_steps(one, values)


@jax.custom_jvp
def _nudged(y: jax.Array, nudge: jax.Array) -> jax.Array:
    """`y`, whose derivative has the derivative of `nudge` added."""
    return y


@_nudged.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return primals[0], tangents[0] + tangents[1]
