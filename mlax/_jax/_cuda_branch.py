"""A branch of `lax.platform_dependent` that only CUDA can lower, in a program for several platforms."""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

PLATFORMS = ("cuda",)


def cuda_branch(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as the branch `cuda=` of `lax.platform_dependent`, with operations that exist for CUDA alone.

    In an export for several platforms JAX lowers each branch for all of them, which kernels in Pallas, attention by
    cuDNN and exported programs refuse. Here this one is lowered for CUDA. It has no derivative, so it must be inside of
    a `with_vjp`, and no collectives over an axis of `vmap`. Over a mesh, whose axes its types would have to keep, or
    with effects, it is `function` itself.
    """

    def call(*args: Any) -> Any:
        if not all(jax.typeof(leaf).sharding.mesh.empty for leaf in jax.tree.leaves(args)):
            return function(*args)
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        if closed.effects:
            return function(*args)
        return jax.tree.unflatten(jax.tree.structure(shapes), _bind(closed, jax.tree.leaves(args)))

    return call


def _bind(closed: Any, args: list[Any]) -> list[Any]:
    """The results of a closed jaxpr, whose constants, which may be tracers, are hoisted to arguments."""
    jaxpr = closed.jaxpr
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    return cuda_branch_p.bind(*closed.consts, *args, jaxpr=jaxpr)


def _evaluate(*args: Any, jaxpr: Any) -> list[Any]:
    return eval_jaxpr(jaxpr, (), *args)


def _lower(ctx: Any, *args: Any, jaxpr: Any) -> Any:
    if tuple(ctx.module_context.platforms) != PLATFORMS:
        # a fresh cache of functions, which are not keyed by their platforms
        module = ctx.module_context.replace(platforms=PLATFORMS, cached_primitive_lowerings={})
        ctx = ctx.replace(module_context=module)
    return mlir.lower_fun(_evaluate, multiple_results=True)(ctx, *args, jaxpr=jaxpr)


def _batch(args: Any, axes: Any, *, jaxpr: Any) -> tuple[list[Any], list[int]]:
    def batched(*args: Any) -> list[Any]:
        return jax.vmap(lambda *args: _evaluate(*args, jaxpr=jaxpr), in_axes=tuple(axes))(*args)

    y = _bind(jax.make_jaxpr(batched)(*args), list(args))
    return y, [0] * len(y)


cuda_branch_p = Primitive("cuda_branch")
cuda_branch_p.multiple_results = True
cuda_branch_p.def_impl(_evaluate)
cuda_branch_p.def_abstract_eval(lambda *avals, jaxpr: [out.aval for out in jaxpr.outvars])
batching.primitive_batchers[cuda_branch_p] = _batch
mlir.register_lowering(cuda_branch_p, _lower)
