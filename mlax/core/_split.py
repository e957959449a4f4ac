"""The scan of a cell made of parts: what needs no carry for all steps at once, then the rest step by step."""

import collections
from collections.abc import Callable
from typing import Any

import jax

from mlax.core._all_steps import over_all_steps
from mlax.core._cell import CompositeCell
from mlax.core._deferred import Apply, Step, deferred_scan
from mlax.core._keys import named_key
from mlax.core._layer import Layer, Tree, structs
from mlax.core._parts import Sub
from mlax.core._turned import Function

Keep = Callable[[Any, Any, Any, Any], tuple[Any, Any]]  # of (within, carry, next carry, y) to (next carry, y)


def split_scan(
    cell: CompositeCell,
    carry: Any,
    x: Any,
    trainables: dict[str, Tree],
    keys: jax.Array | None,
    within: jax.Array | None,
    keep: Keep,
    *,
    inference_mode: bool,
    reverse: bool,
    unroll: int,
) -> tuple[Any, Any]:
    """The last carry and y (t, b, ...) from the first and x (t, b, ...)."""
    like = structs(trainables)  # what a derivative holds on to may not hold the variables

    def sub(phase: str, apply: Apply, key: jax.Array | None) -> Sub:
        """The cell's parts; each call of one has a key of its own, if it reads it at all."""
        calls = collections.Counter[str]()

        def call(name: str, part: Layer, x: Any) -> Any:
            def run(weights: Tree, given: tuple[Any, jax.Array | None]) -> Any:
                return part.fwd(given[0], weights, None, rng=given[1], inference_mode=inference_mode)[0]

            calls[name] += 1
            own = None
            if key is not None and _reads_key(run, like.get(name), structs(x)):
                own = named_key(named_key(key, phase), f"{name}#{calls[name]}")
            return apply(name, run, (x, own))

        return Sub(cell, call, inference_mode)

    def ahead(weights: dict[str, Tree], given: tuple[Any, jax.Array | None]) -> Any:
        x, key = given
        return cell.ahead(sub("ahead", _with(weights), key), x)

    def feedback(weights: dict[str, Tree], given: tuple[Any, jax.Array | None]) -> Any:
        carry, key = given
        return cell.feedback(sub("feedback", _with(weights), key), carry)

    def step(apply: Apply, carry: Any, ahead: Any, fixed: tuple[Any, Any, Any]) -> tuple[Any, Any]:
        _, key, within = fixed
        return keep(within, carry, *cell.step(sub("step", apply, key), carry, ahead))

    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), x)
    ahead_keys = keys if keys is not None and _reads_key(ahead, like, one) else None
    feedback_keys = keys if keys is not None and _reads_key(feedback, like, structs(carry)) else None
    return deferred_scan(
        Step(feedback, step),
        carry,
        over_all_steps(lambda given: ahead(trainables, given), (x, ahead_keys)),
        (feedback_keys, keys, within),
        trainables,
        reverse=reverse,
        unroll=unroll,
    )


def _with(weights: dict[str, Tree]) -> Apply:
    return lambda name, run, given: run(weights.get(name), given)


def _reads_key(run: Function, weights: Any, x: Any) -> bool:
    """Whether `run(weights, (x, key))` does anything with the key: without one, steps can share a batch."""
    key = jax.eval_shape(jax.random.key, 0)
    traced = jax.make_jaxpr(lambda key, weights, x: run(weights, (x, key)))(key, weights, x)
    first = traced.jaxpr.invars[0]
    return any(var is first for eqn in traced.jaxpr.eqns for var in eqn.invars)
