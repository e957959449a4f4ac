"""A scan whose weights are differentiated for all of its steps at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Function = Callable[[Any, Any], Any]  # of (weights, value)
Apply = Callable[[str, Function, Any], Any]  # of (name, function, value): function(weights[name], value)
Step = Callable[[Apply, Any, Any, Any], tuple[Any, Any]]  # of (apply, carry, x, fixed) to (carry, y)


def deferred_scan(
    step: Step, carry: Any, xs: Any, fixed: Any, weights: dict[str, Any], *, reverse: bool = False, unroll: int = 1
) -> tuple[Any, Any]:
    """`lax.scan` of a step that uses its weights by `apply` alone; `fixed` is scanned like `xs` and has no derivative.

    JAX's own derivative of a scan adds up the weights' gradients step by step, a small product and a pass over the
    weights each time. This one is the same sum in another order. A change of the weights nudges what each `apply`
    gives; so the nudges of all steps are one product before the scan of the derivatives, which carries on nothing
    but the carry's, and transposed, the gradient is one product after it. It is a rule for `jax.jvp`, from which
    JAX derives the backward pass; so derivatives of every order and in both directions exist.
    """

    @jax.custom_jvp
    def scan(carry: Any, xs: Any, fixed: Any, weights: dict[str, Any]) -> tuple[Any, Any]:
        def apply(name: str, function: Function, value: Any) -> Any:
            return function(weights.get(name), value)

        def body(carry: Any, now: tuple[Any, Any]) -> tuple[Any, Any]:
            return step(apply, carry, *now)

        return lax.scan(body, carry, (xs, fixed), reverse=reverse, unroll=unroll)

    @scan.defjvp
    def derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        carry, xs, fixed, weights = primals
        sites: list[tuple[str, Function, Any]] = []  # each `apply` of a step, and the shapes of what it gives

        def survey(carry: Any, now: tuple[Any, Any]) -> None:
            def apply(name: str, function: Function, value: Any) -> Any:
                y = function(weights.get(name), value)
                if name in weights:
                    sites.append((name, function, jax.eval_shape(lambda: y)))
                return y

            step(apply, carry, *now)

        now = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (xs, fixed))
        jax.eval_shape(survey, carry, now)
        times = jax.tree.leaves(xs)[0].shape[0]

        def nudged_scan(carry: Any, xs: Any, nudges: list[Any]) -> tuple[Any, Any]:
            def body(carry: Any, now: tuple[Any, Any, list[Any]]) -> tuple[Any, Any]:
                x, fixed, nudges = now
                values: list[Any] = []

                def apply(name: str, function: Function, value: Any) -> Any:
                    y = function(weights.get(name), value)
                    if name not in weights:
                        return y
                    values.append(value)
                    return jax.tree.map(_nudged, y, nudges[len(values) - 1])

                carry, y = step(apply, carry, x, fixed)
                return carry, (y, values)

            carry, (y, values) = lax.scan(body, carry, (xs, fixed, nudges), reverse=reverse, unroll=unroll)
            return (carry, y), values

        still = [jax.tree.map(lambda leaf: jnp.zeros((times, *leaf.shape), leaf.dtype), like) for _, _, like in sites]
        out, push, values = jax.linearize(nudged_scan, carry, xs, still, has_aux=True)

        def nudge(name: str, function: Function, value: Any) -> Any:
            def by_weights(value: Any) -> Any:
                return jax.jvp(lambda own: function(own, value), (weights[name],), (tangents[3][name],))[1]

            with jax.named_scope(name):
                return jax.vmap(by_weights)(value)

        nudges = [nudge(name, function, value) for (name, function, _), value in zip(sites, values, strict=True)]
        return out, push(tangents[0], tangents[1], nudges)

    return scan(carry, xs, fixed, weights)


@jax.custom_jvp
def _nudged(y: jax.Array, nudge: jax.Array) -> jax.Array:
    """`y`, whose derivative has the derivative of `nudge` added."""
    return y


@_nudged.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return primals[0], tangents[0] + tangents[1]
