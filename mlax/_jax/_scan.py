"""Scans over time whose weight gradients are batched over all steps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlax._jax._barrier import fusion_barrier
from mlax._jax._custom_jvp import with_jvps
from mlax._jax._sharding import is_unsharded_cpu

Function = Callable[[Any, Any], Any]  # of (weights, value)
Apply = Callable[[str, Function, Any], Any]  # of (name, function, value): function(weights[name], value)


@dataclasses.dataclass(frozen=True)
class ScanStep:
    """What is scanned: `x + feedback(weights, (carry, key))`, if there is a feedback, and then `step`."""

    feedback: Function
    step: Callable[[Apply, Any, Any, Any], tuple[Any, Any]]  # of (apply, carry, x, fixed) to (carry, y)

    def __call__(self, apply: Apply, weights: dict[str, Any], carry: Any, x: Any, fixed: Any) -> tuple[Any, Any]:
        return self.step(apply, carry, add_feedback(x, self.feedback(weights, (carry, fixed[0]))), fixed)


def batched_grad_scan(
    step: ScanStep, carry: Any, xs: Any, fixed: Any, weights: dict[str, Any], *, reverse: bool = False, unroll: int = 1
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
        kernels = transpose_kernels(weights)
        eased = dataclasses.replace(
            step, feedback=lambda weights, given: apply_with_transposed(step.feedback, weights, kernels, given)
        )

        def nudged_scan(carry: Any, xs: Any, nudges: list[Any]) -> tuple[Any, Any]:
            def body(carry: Any, now: tuple[Any, Any, list[Any]]) -> tuple[Any, Any]:
                x, fixed, nudges = now
                values: list[Any] = []

                def apply(name: str, function: Function, value: Any) -> Any:
                    if name not in weights:
                        return function(None, value)
                    y = apply_with_transposed(function, weights[name], kernels[name], value)
                    values.append(value)
                    return jax.tree.map(_nudged, y, nudges[len(values) - 1])

                after, y = eased(apply, weights, carry, x, fixed)
                return after, (y, (carry, values))

            carry, (y, kept) = scan_with_residuals(body, carry, (xs, fixed, nudges), reverse=reverse, unroll=unroll)
            return (carry, y), kept

        still = [jax.tree.map(lambda leaf: _zeros(times, leaf), like) for _, _, like in uses]
        out, push, (before, values) = jax.linearize(nudged_scan, carry, xs, still, has_aux=True)
        dxs = add_feedback(dxs, _nudge(step.feedback, weights, dweights, (before, fixed[0])))
        nudges = []
        for (name, function, _), value in zip(uses, values, strict=True):
            with jax.named_scope(name):
                nudges.append(_nudge(function, weights[name], dweights[name], value))
        return out, push(dcarry, dxs, nudges)

    return scan(carry, xs, fixed, weights)


def add_feedback(ahead: Any, feedback: Any) -> Any:
    """The sum of the two, leaf by leaf, or the first if there is no second."""
    return ahead if feedback is None else jax.tree.map(lambda a, b: a + b, ahead, feedback)


def _uses(step: ScanStep, carry: Any, xs: Any, fixed: Any, weights: dict[str, Any]) -> list[tuple[str, Function, Any]]:
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

    return time_vmap(one, values)


@jax.custom_jvp
def _nudged(y: jax.Array, nudge: jax.Array) -> jax.Array:
    """`y`, whose derivative has the derivative of `nudge` added."""
    return y


@_nudged.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return primals[0], tangents[0] + tangents[1]


def scan_with_residuals(
    body: Callable[[Any, Any], tuple[Any, tuple[Any, Any]]], carry: Any, xs: Any, *, reverse: bool, unroll: int
) -> tuple[Any, tuple[Any, Any]]:
    """`lax.scan` of a body from (carry, x) to (carry, (y, kept)).

    Most cells show what they carry: what a step keeps of such a carry is y of the step before, and not stored again.
    """
    first = jax.tree.leaves(carry)
    known: dict[int, tuple[int, int]] = {}  # leaves of `kept`: which of the carry they are, and which of y shows it
    form: Any = None

    def step(carry: Any, x: Any) -> tuple[Any, tuple[Any, list[Any]]]:
        nonlocal form
        after, (y, kept) = body(carry, x)
        shown = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(y))}
        pairs = enumerate(zip(jax.tree.leaves(carry), jax.tree.leaves(after), strict=True))
        found = {id(old): (place, shown[id(new)]) for place, (old, new) in pairs if id(new) in shown}
        leaves, form = jax.tree.flatten(kept)
        known.update({place: found[id(leaf)] for place, leaf in enumerate(leaves) if id(leaf) in found})
        return after, (y, [None if place in known else leaf for place, leaf in enumerate(leaves)])

    def delayed(y: jax.Array, start: jax.Array) -> jax.Array:
        return lax.concatenate([y, start[None]], 0)[1:] if reverse else lax.concatenate([start[None], y], 0)[:-1]

    last, (y, kept) = lax.scan(step, carry, xs, reverse=reverse, unroll=unroll)
    for place, (old, new) in known.items():
        kept[place] = delayed(jax.tree.leaves(y)[new], first[old])
    return last, (y, jax.tree.unflatten(form, kept))


def transpose_kernels(weights: Any) -> Any:
    """Each matrix among the weights laid out the other way, for `run_turned`; None for what is no matrix.

    Back through a product one multiplies by the kernel turned. XLA on a CPU reads it as it lies, and takes half as
    long again; in a loop, at every step.
    """
    return jax.tree.map(_transpose_kernel, weights)


def apply_with_transposed(function: Function, weights: Any, turned: Any, value: Any) -> Any:
    """`function(weights, value)`, back through which one multiplies by the matrices as they lie in `turned`."""

    def run(weights: Any, turned: Any, value: Any) -> Any:
        return function(weights, value)

    def by_weights(dot: Any, weights: Any, turned: Any, value: Any) -> Any:
        return jax.jvp(lambda weights: function(weights, value), (weights,), (dot,))[1]

    # checkpoint: else JAX would turn them back before the loop; where it multiplies, XLA does not turn them at all
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def by_value(dot: Any, weights: Any, turned: Any, value: Any) -> Any:
        back = jax.tree.map(lambda leaf, other: leaf if other is None else other.T, weights, turned)
        return jax.jvp(lambda value: function(back, value), (value,), (dot,))[1]

    return with_jvps(run, by_weights, None, by_value)(weights, turned, value)


def _transpose_kernel(leaf: jax.Array) -> jax.Array | None:
    return fusion_barrier(lax.transpose(leaf, (1, 0))) if leaf.ndim == 2 and is_unsharded_cpu(leaf) else None


def time_vmap(function: Callable[[Any], Any], value: Any) -> Any:
    """`jax.vmap(function)(value)`, where `function` treats each example of its batch alike.

    Then time can be merged with the batch, (t, b, ...) to (t b, ...), and on a CPU that is faster: XLA copies the
    operands of a product that sums over two axes, as a kernel's gradient would. Elsewhere, and where an axis is or
    may be sharded, it is mapped. So are keys, of which each step has its own, and whatever else is not a batch.
    """
    leaves = jax.tree.leaves(value)
    sizes = {leaf.shape[:2] for leaf in leaves}
    if len(sizes) != 1 or not all(map(_mergeable, leaves)):
        return jax.vmap(function)(value)
    times, batch = sizes.pop()
    y = function(jax.tree.map(lambda leaf: leaf.reshape(times * batch, *leaf.shape[2:]), value))
    y = fusion_barrier(y)  # XLA adds a bias in place, but fused with the reshape, into a second array as large
    return jax.tree.map(lambda leaf: leaf.reshape(times, batch, *leaf.shape[1:]), y)


def _mergeable(leaf: jax.Array) -> bool:
    return leaf.ndim >= 2 and jnp.issubdtype(leaf.dtype, jnp.floating) and is_unsharded_cpu(leaf)
