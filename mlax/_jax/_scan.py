"""Scans over time whose weight gradients are batched over all steps."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlax._jax._barrier import fusion_barrier
from mlax._jax._sharding import is_unsharded_cpu

Function = Callable[[Any, Any], Any]  # of (weights, value)
Apply = Callable[[str, Function, Any], Any]  # of (name, function, value): function(weights[name], value)


@dataclasses.dataclass(frozen=True)
class ScanStep:
    """The body of a scan: add `feedback(weights, (carry, key))` to x, if it is not None, then call `step`."""

    feedback: Function
    step: Callable[[Apply, Any, Any, Any], tuple[Any, Any]]  # of (apply, carry, x, nondiff) to (carry, y)

    def __call__(self, apply: Apply, weights: dict[str, Any], carry: Any, x: Any, nondiff: Any) -> tuple[Any, Any]:
        added = self.feedback(weights, (carry, nondiff[0]))
        # XLA fuses the slice of x into its consumers, which is well for a sum, but takes a loop that reads it several
        # times, as for the gates of a GRU, up to twice as long on a CPU
        x = fusion_barrier(x) if added is None and jax.default_backend() == "cpu" else add_feedback(x, added)
        return self.step(apply, carry, x, nondiff)


def add_feedback(x: Any, feedback: Any) -> Any:
    """The sum of two pytrees, or the first if the second is None."""
    return x if feedback is None else jax.tree.map(lambda a, b: a + b, x, feedback)


def batched_grad_scan(
    step: ScanStep,
    carry: Any,
    xs: Any,
    nondiff: Any,
    weights: dict[str, Any],
    *,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, Any]:
    """`lax.scan` of a step that uses its weights only through `feedback` and `apply`.

    `nondiff`, whose first entry holds the keys for `feedback`, is scanned like `xs` and is not differentiated.

    JAX's derivative of a scan accumulates weight gradients step by step: a small product and a pass over the weights
    at each one. Here the same sum is taken in another order. A tangent of the weights perturbs the result of each of
    their uses; the perturbations of all steps are one product before the tangent scan, which carries only the
    tangent of the carry. Transposed, the weight gradient is one product after the backward scan. As a JVP rule it is
    differentiable to every order in both modes.
    """

    @jax.custom_jvp
    def scan(carry: Any, xs: Any, nondiff: Any, weights: dict[str, Any]) -> tuple[Any, Any]:
        def apply(name: str, function: Function, value: Any) -> Any:
            return function(weights.get(name), value)

        def body(carry: Any, now: tuple[Any, Any]) -> tuple[Any, Any]:
            return step(apply, weights, carry, *now)

        return lax.scan(body, carry, (xs, nondiff), reverse=reverse, unroll=unroll)

    @scan.defjvp
    def jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        carry, xs, nondiff, weights = primals
        dcarry, dxs, _, dweights = tangents
        uses = _find_uses(step, carry, xs, nondiff, weights)
        times = jax.tree.leaves(xs)[0].shape[0]

        def perturbed_scan(carry: Any, xs: Any, perturbations: list[Any]) -> tuple[Any, Any]:
            def body(carry: Any, now: tuple[Any, Any, list[Any]]) -> tuple[Any, Any]:
                x, nondiff, perturbations = now
                values: list[Any] = []

                def apply(name: str, function: Function, value: Any) -> Any:
                    y = function(weights.get(name), value)
                    if name not in weights:
                        return y
                    values.append(value)
                    return jax.tree.map(_perturb, y, perturbations[len(values) - 1])

                after, y = step(apply, weights, carry, x, nondiff)
                return after, (y, (carry, values))

            xs = (xs, nondiff, perturbations)
            carry, (y, residuals) = scan_with_residuals(body, carry, xs, reverse=reverse, unroll=unroll)
            return (carry, y), residuals

        zeros = [jax.tree.map(lambda leaf: _zeros_stack(times, leaf), shape) for _, _, shape in uses]
        out, pushforward, (carries, values) = jax.linearize(perturbed_scan, carry, xs, zeros, has_aux=True)
        dxs = add_feedback(dxs, _weight_tangents(step.feedback, weights, dweights, (carries, nondiff[0])))
        perturbations = []
        for (name, function, _), value in zip(uses, values, strict=True):
            with jax.named_scope(name):
                perturbations.append(_weight_tangents(function, weights[name], dweights[name], value))
        return out, pushforward(dcarry, dxs, perturbations)

    return scan(carry, xs, nondiff, weights)


def scan_with_residuals(
    body: Callable[[Any, Any], tuple[Any, tuple[Any, Any]]], carry: Any, xs: Any, *, reverse: bool, unroll: int
) -> tuple[Any, tuple[Any, Any]]:
    """`lax.scan` of a body from (carry, x) to (carry, (y, residuals)), which stores no array twice.

    Most cells output what they carry: a residual that is such a carry is y of the previous step, shifted by one.
    """
    first = jax.tree.leaves(carry)
    shared: dict[int, tuple[int, int]] = {}  # index of a residual: indices of the equal leaves of the carry and of y
    treedef: Any = None

    def step(carry: Any, x: Any) -> tuple[Any, tuple[Any, list[Any]]]:
        nonlocal treedef
        after, (y, residuals) = body(carry, x)
        outputs = {id(leaf): index for index, leaf in enumerate(jax.tree.leaves(y))}
        pairs = enumerate(zip(jax.tree.leaves(carry), jax.tree.leaves(after), strict=True))
        found = {id(old): (index, outputs[id(new)]) for index, (old, new) in pairs if id(new) in outputs}
        leaves, treedef = jax.tree.flatten(residuals)
        shared.update({index: found[id(leaf)] for index, leaf in enumerate(leaves) if id(leaf) in found})
        return after, (y, [None if index in shared else leaf for index, leaf in enumerate(leaves)])

    def shift(y: jax.Array, start: jax.Array) -> jax.Array:
        return lax.concatenate([y, start[None]], 0)[1:] if reverse else lax.concatenate([start[None], y], 0)[:-1]

    last, (y, residuals) = lax.scan(step, carry, xs, reverse=reverse, unroll=unroll)
    for index, (in_carry, in_y) in shared.items():
        residuals[index] = shift(jax.tree.leaves(y)[in_y], first[in_carry])
    return last, (y, jax.tree.unflatten(treedef, residuals))


def time_vmap(function: Callable[[Any], Any], value: Any) -> Any:
    """`jax.vmap(function)(value)` over time, where `function` treats each example of its batch alike.

    On a CPU, time is merged with the batch, (t, b, ...) to (t b, ...), which is faster: XLA copies the operands of a
    product that sums over two axes, as the gradient of a kernel does. Elsewhere, where an axis is or may be sharded,
    and for leaves without a batch, such as keys, it is a vmap. Images with an explicitly sharded batch are merged the
    other way round, (b t, ...): the vmap of a convolution would put time first, which JAX refuses for such a batch.
    """
    leaves = jax.tree.leaves(value)
    sizes = {leaf.shape[:2] for leaf in leaves}
    if len(sizes) == 1 and all(map(_has_sharded_images, leaves)):
        y = function(jax.tree.map(_merge_batch_first, value))
        times, batch = sizes.pop()
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf.reshape(batch, times, *leaf.shape[1:]), 1, 0), y)
    if len(sizes) != 1 or not all(map(_is_mergeable, leaves)):
        return jax.vmap(function)(value)
    times, batch = sizes.pop()
    y = function(jax.tree.map(lambda leaf: leaf.reshape(times * batch, *leaf.shape[2:]), value))
    y = fusion_barrier(y)  # XLA adds a bias in place, but fused with the reshape it allocates a second array
    return jax.tree.map(lambda leaf: leaf.reshape(times, batch, *leaf.shape[1:]), y)


def _has_sharded_images(leaf: jax.Array) -> bool:
    """Whether it is (t, b, *spatial, c) with an explicitly sharded batch."""
    spec = jax.typeof(leaf).sharding.spec
    return leaf.ndim >= 4 and spec[0] is None and spec[1] is not None


def _merge_batch_first(leaf: jax.Array) -> jax.Array:
    return jnp.moveaxis(leaf, 0, 1).reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def _is_mergeable(leaf: jax.Array) -> bool:
    return leaf.ndim >= 2 and jnp.issubdtype(leaf.dtype, jnp.floating) and is_unsharded_cpu(leaf)


def _find_uses(
    step: ScanStep, carry: Any, xs: Any, nondiff: Any, weights: dict[str, Any]
) -> list[tuple[str, Function, Any]]:
    """(name, function, output shapes) of each `apply` of a step to existing weights."""
    uses: list[tuple[str, Function, Any]] = []

    def apply(name: str, function: Function, value: Any) -> Any:
        y = function(weights.get(name), value)
        if name in weights:
            uses.append((name, function, jax.eval_shape(lambda: y)))
        return y

    def body(carry: Any, now: tuple[Any, Any]) -> tuple[Any, Any]:
        uses.clear()  # a scan may trace its body twice
        return step(apply, weights, carry, *now)

    jax.eval_shape(lambda carry, now: lax.scan(body, carry, now), carry, (xs, nondiff))
    return uses


def _zeros_stack(times: int, like: Any) -> jax.Array:
    """Zeros of `like`'s shape and sharding, stacked."""
    return jnp.broadcast_to(jnp.zeros_like(like), (times, *like.shape))


def _weight_tangents(function: Function, weights: Any, dweights: Any, values: Any) -> Any:
    """The tangent of `function` at each step's value, for a tangent of the weights."""

    def one(value: Any) -> Any:
        return jax.jvp(lambda weights: function(weights, value), (weights,), (dweights,))[1]

    return time_vmap(one, values)


@jax.custom_jvp
def _perturb(y: jax.Array, perturbation: jax.Array) -> jax.Array:
    """`y`, whose tangent includes that of `perturbation`."""
    return y


@_perturb.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return primals[0], tangents[0] + tangents[1]
