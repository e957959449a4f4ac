"""A branch of `lax.platform_dependent` that only CUDA can lower, in a program for several platforms."""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def cuda_branch(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as the branch `cuda=` of `lax.platform_dependent`, with operations that exist for CUDA alone.

    In an export for several platforms JAX lowers each branch for all of them, which kernels in Pallas, attention by
    cuDNN and exported programs refuse. Here this one is lowered for CUDA. It has no derivative, as the passes of
    `with_vjp`. Over a mesh it is `function` itself.
    """

    def call(*args: Any) -> Any:
        if not all(jax.typeof(leaf).sharding.mesh.empty for leaf in jax.tree.leaves(args)):
            return function(*args)
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shapes), _bind(closed, jax.tree.leaves(args)))

    return call


def _bind(closed: Any, args: list[Any]) -> list[Any]:
    """The results of a closed jaxpr; its constants, which may be tracers, become arguments."""
    jaxpr = closed.jaxpr
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    return _cuda_branch.bind(*closed.consts, *args, jaxpr=jaxpr)


def _evaluate(*args: Any, jaxpr: Any) -> list[Any]:
    return eval_jaxpr(jaxpr, (), *args)


def _lower(ctx: Any, *args: Any, jaxpr: Any) -> Any:
    # without the functions that are already lowered for all platforms, and apart from those that follow
    module = ctx.module_context.replace(platforms=("cuda",), cached_primitive_lowerings={})
    return mlir.lower_fun(_evaluate, multiple_results=True)(ctx.replace(module_context=module), *args, jaxpr=jaxpr)


def _batch(args: Any, axes: Any, *, jaxpr: Any) -> tuple[list[Any], list[int]]:
    def batched(*args: Any) -> list[Any]:
        return jax.vmap(lambda *args: _evaluate(*args, jaxpr=jaxpr), in_axes=tuple(axes))(*args)

    y = _bind(jax.make_jaxpr(batched)(*args), list(args))
    return y, [0] * len(y)


_cuda_branch = Primitive("cuda_branch")
_cuda_branch.multiple_results = True
_cuda_branch.def_impl(_evaluate)
_cuda_branch.def_abstract_eval(lambda *avals, jaxpr: [out.aval for out in jaxpr.outvars])
batching.primitive_batchers[_cuda_branch] = _batch
mlir.register_lowering(_cuda_branch, _lower)
