"""A function with a fast forward and backward pass that has every other derivative too."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Forward = Callable[..., Any]  # of (primals, consts) to (output, residuals)
Backward = Callable[..., Any]  # of (residuals, primals, consts, cotangent) to the cotangents of the primals
Plain = Callable[..., Any]  # of (primals, consts) to the output
Tangent = Callable[..., Any]  # of (residuals, primals, consts, tangents) to the tangent of the output


def with_vjp(plain: Plain, forward: Forward, backward: Backward, tangent: Tangent | None = None) -> Plain:
    """`plain`, computed by `forward` and differentiated in reverse mode by `backward`.

    It is `jax.custom_vjp` without its limits: in forward mode `tangent` is computed, which is the JVP of `plain` unless
    given, and all higher derivatives are those of `plain`. `forward` and `backward` are never differentiated, so they
    may be kernels and loops without rules. Primals and outputs are trees of floating arrays, consts of any.
    """
    rules = _Rules(plain, backward, tangent or functools.partial(_plain_tangent, plain))

    def call(primals: Any, consts: Any = None) -> Any:
        y, residuals = forward(*lax.stop_gradient((primals, consts)))
        points, tree = jax.tree.flatten(primals)
        rest, rest_tree = jax.tree.flatten((residuals, consts))
        outputs, out_tree = jax.tree.flatten(y)
        filled = rules._replace(tree=tree, rest_tree=rest_tree, out_tree=out_tree)
        return out_tree.unflatten(_attach.bind(*rest, *points, *outputs, rules=filled))

    return call


def _plain_tangent(plain: Plain, residuals: Any, primals: Any, consts: Any, tangents: Any) -> Any:
    return jax.jvp(lambda primals: plain(primals, consts), (primals,), (tangents,))[1]


class _Rules(NamedTuple):
    """The Jacobian of `plain` at the primals, as a linear map of the tangents that are not zero, or its transpose.

    Arguments are lists of leaves: the rest, which is not differentiated, the primals and the linear arguments.
    """

    plain: Plain
    backward: Backward
    tangent: Tangent
    tree: Any = None  # of the primals
    rest_tree: Any = None  # of the residuals and the consts
    out_tree: Any = None  # of the outputs
    is_live: tuple[bool, ...] = ()  # of each primal: whether its tangent is an argument
    is_transposed: bool = False
    batch_axes: tuple[tuple[int | None, ...], ...] = ()  # of each `vmap`, innermost first: of the rest and the primals

    def apply(self, rest: list[Any], primals: list[Any], linear: list[Any]) -> list[Any]:
        """The map, computed fast."""
        return self._vmap(self._apply_transpose if self.is_transposed else self._apply_forward)(rest, primals, linear)

    def apply_plain(self, rest: list[Any], primals: list[Any], linear: list[Any]) -> list[Any]:
        """The map, computed by differentiating `plain`, so that it can itself be differentiated."""
        return self._vmap(self._transpose_plain if self.is_transposed else self._forward_plain)(rest, primals, linear)

    def _apply_forward(self, rest: list[Any], primals: list[Any], linear: list[Any]) -> list[Any]:
        return self._call_tangent(self.tangent, rest, primals, linear)

    def _apply_transpose(self, rest: list[Any], primals: list[Any], linear: list[Any]) -> list[Any]:
        residuals, consts = self.rest_tree.unflatten(rest)
        cotangent = self.out_tree.unflatten(linear)
        return self._live_leaves(self.backward(residuals, self.tree.unflatten(primals), consts, cotangent))

    def _forward_plain(self, rest: list[Any], primals: list[Any], linear: list[Any]) -> list[Any]:
        return self._call_tangent(functools.partial(_plain_tangent, self.plain), rest, primals, linear)

    def _transpose_plain(self, rest: list[Any], primals: list[Any], linear: list[Any]) -> list[Any]:
        _, consts = self.rest_tree.unflatten(rest)
        _, pull_back = jax.vjp(lambda primals: self.plain(primals, consts), self.tree.unflatten(primals))
        return self._live_leaves(*pull_back(self.out_tree.unflatten(linear)))

    def _call_tangent(self, tangent: Tangent, rest: list[Any], primals: list[Any], linear: list[Any]) -> list[Any]:
        residuals, consts = self.rest_tree.unflatten(rest)
        dots = tangent(residuals, self.tree.unflatten(primals), consts, self._with_zeros(primals, linear))
        return self.out_tree.flatten_up_to(dots)

    def _with_zeros(self, primals: list[Any], linear: list[Any]) -> Any:
        live = iter(linear)
        pairs = zip(primals, self.is_live, strict=True)
        return self.tree.unflatten([next(live) if keep else lax.full_like(primal, 0) for primal, keep in pairs])

    def _live_leaves(self, cotangents: Any) -> list[Any]:
        return [leaf for leaf, keep in zip(self.tree.flatten_up_to(cotangents), self.is_live, strict=True) if keep]

    def _vmap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        for axes in self.batch_axes:
            rest = self.rest_tree.num_leaves
            function = jax.vmap(function, (list(axes[:rest]), list(axes[rest:]), 0))
        return function


# A primitive and no `jax.custom_jvp`, whose rule is lost where a scan is partially evaluated: this one is the identity
# of its last arguments, but its derivative is that of `plain` at the primals.
_attach = Primitive("attach")
_attach.multiple_results = True
_linear_map = Primitive("linear_map")
_linear_map.multiple_results = True


def _split(arguments: Any, rules: _Rules) -> tuple[list[Any], list[Any], list[Any]]:
    """The rest, the primals and what follows them."""
    rest = rules.rest_tree.num_leaves
    primals = rest + rules.tree.num_leaves
    return list(arguments[:rest]), list(arguments[rest:primals]), list(arguments[primals:])


def _differentiate_attached(arguments: Any, tangents: Any, *, rules: _Rules) -> tuple[Any, Any]:
    rest, primals, _ = _split(arguments, rules)
    _, dots, _ = _split(tangents, rules)
    y = _attach.bind(*arguments, rules=rules)
    is_live = tuple(not isinstance(dot, ad.Zero) for dot in dots)
    if not any(is_live):
        return y, [lax.full_like(each, 0) for each in y]
    live = [dot for dot, keep in zip(dots, is_live, strict=True) if keep]
    return y, _bind(rest, primals, live, rules._replace(is_live=is_live))


def _batch_attached(arguments: Any, axes: Any, *, rules: _Rules) -> tuple[Any, list[int]]:
    # primals too are broadcast, since a tangent is batched where its primal is, and the map needs all of them so
    rest, primals, y, rules = _batch_arguments(arguments, axes, rules, broadcast_from=rules.rest_tree.num_leaves)
    return _attach.bind(*rest, *primals, *y, rules=rules), [0] * len(y)


def _bind(rest: list[Any], primals: list[Any], linear: list[Any], rules: _Rules) -> list[Any]:
    # traced here, not when it is lowered, so that the types of its outputs are known and its operations can be audited
    jaxpr = jax.make_jaxpr(rules.apply)(rest, primals, linear)
    return _linear_map.bind(*rest, *primals, *linear, rules=rules, jaxpr=jaxpr)


def _evaluate(*arguments: Any, rules: _Rules, jaxpr: Any) -> list[Any]:
    return rules.apply(*_split(arguments, rules))


def _differentiate(arguments: Any, tangents: Any, *, rules: _Rules, jaxpr: Any) -> tuple[Any, Any]:
    rest, primals, linear = _split(arguments, rules)
    _, primal_dots, linear_dots = _split(tangents, rules)
    changes: list[list[Any]] = []
    if any(not isinstance(dot, ad.Zero) for dot in linear_dots):
        changes.append(_bind(rest, primals, [ad.instantiate_zeros(dot) for dot in linear_dots], rules))
    if any(not isinstance(dot, ad.Zero) for dot in primal_dots):
        dots = [ad.instantiate_zeros(dot) for dot in primal_dots]
        changes.append(jax.jvp(lambda at: rules.apply_plain(rest, at, linear), (primals,), (dots,))[1])
    y = _bind(rest, primals, linear, rules)
    if not changes:
        return y, [lax.full_like(each, 0) for each in y]
    return y, functools.reduce(lambda a, b: [lax.add(*pair) for pair in zip(a, b, strict=True)], changes)


def _transpose(cotangents: Any, *arguments: Any, rules: _Rules, jaxpr: Any) -> list[Any]:
    rest, primals, linear = _split(arguments, rules)
    cotangents = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    grads = _bind(rest, primals, cotangents, rules._replace(is_transposed=not rules.is_transposed))
    kept = [grad if ad.is_undefined_primal(x) else None for x, grad in zip(linear, grads, strict=True)]
    return [None] * (len(arguments) - len(linear)) + kept


def _batch(arguments: Any, axes: Any, *, rules: _Rules, jaxpr: Any) -> tuple[list[Any], list[int]]:
    linear = rules.rest_tree.num_leaves + rules.tree.num_leaves
    y = _bind(*_batch_arguments(arguments, axes, rules, broadcast_from=linear))
    return y, [0] * len(y)


def _batch_arguments(
    arguments: Any, axes: Any, rules: _Rules, *, broadcast_from: int
) -> tuple[list[Any], list[Any], list[Any], _Rules]:
    """The arguments with their batch axis first, which those from `broadcast_from` on are given if they have none."""
    size = next(x.shape[axis] for x, axis in zip(arguments, axes, strict=True) if axis is not None)

    def move(index: int, x: Any, axis: int | None) -> tuple[Any, int | None]:
        if axis is not None:
            return jnp.moveaxis(x, axis, 0), 0
        return (lax.broadcast(x, (size,)), 0) if index >= broadcast_from else (x, None)

    moved = [move(index, x, axis) for index, (x, axis) in enumerate(zip(arguments, axes, strict=True))]
    rest, primals, last = _split([x for x, _ in moved], rules)
    held = tuple(axis for _, axis in moved[: len(rest) + len(primals)])
    return rest, primals, last, rules._replace(batch_axes=(*rules.batch_axes, held))


_attach.def_impl(lambda *arguments, rules: _split(arguments, rules)[2])
_attach.def_abstract_eval(lambda *avals, rules: _split(avals, rules)[2])
ad.primitive_jvps[_attach] = _differentiate_attached
batching.primitive_batchers[_attach] = _batch_attached
mlir.register_lowering(_attach, lambda context, *arguments, rules: _split(arguments, rules)[2])
_linear_map.def_impl(_evaluate)
_linear_map.def_abstract_eval(lambda *avals, rules, jaxpr: jaxpr.out_avals)
ad.primitive_jvps[_linear_map] = _differentiate
ad.primitive_transposes[_linear_map] = _transpose
batching.primitive_batchers[_linear_map] = _batch
mlir.register_lowering(_linear_map, mlir.lower_fun(_evaluate, multiple_results=True))
