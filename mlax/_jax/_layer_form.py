"""A function with a second form for `layer_scan`, whose operands and results are slices of stacks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

LAYER_FORM = "layer_form"  # the name of the primitive


def with_layer_form(function: Callable[..., Any], layer_form: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which `layer_scan` computes by `layer_form` where it stores some of the arrays that are returned.

    Both return arrays of the same types. They close over no tracers and have no derivative, as the forward pass of
    `with_vjp`. `layer_form` is traced only where it is used, and under `vmap` `function` is computed.
    """

    def call(*args: Any) -> Any:
        flat, tree = jax.tree.flatten(args)
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        out_tree = jax.tree.structure(shapes)

        def flat_form(*flat: Any) -> list[Any]:
            return out_tree.flatten_up_to(layer_form(*tree.unflatten(flat)))

        return out_tree.unflatten(_layer_form.bind(*flat, jaxpr=closed, forms=_Forms(closed, flat_form)))

    return call


@dataclasses.dataclass(frozen=True, eq=False)
class _Forms:
    """Not a tuple, in which JAX and `inspect` would look for jaxprs that run."""

    ordinary: Any  # a closed jaxpr
    layer_form: Callable[..., list[Any]]


_layer_form = Primitive(LAYER_FORM)
_layer_form.multiple_results = True


def use_layer_forms(jaxpr: Any, stored: set[Any]) -> Any:
    """The jaxpr with the second form of each function that has one and returns some variables that are stored.

    Functions in the jaxprs of its equations keep the first one.
    """

    def is_used(eqn: Any) -> bool:
        return eqn.primitive.name == LAYER_FORM and not stored.isdisjoint(eqn.outvars)

    return jaxpr.replace(eqns=[_use_layer_form(eqn) if is_used(eqn) else eqn for eqn in jaxpr.eqns])


def _use_layer_form(eqn: Any) -> Any:
    types = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
    closed = jax.make_jaxpr(eqn.params["forms"].layer_form)(*types)
    return eqn.replace(params={**eqn.params, "jaxpr": closed})


def _evaluate(*args: Any, jaxpr: Any, forms: _Forms) -> list[Any]:
    return eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args)


def _batch(args: Any, axes: Any, *, jaxpr: Any, forms: _Forms) -> tuple[list[Any], list[int]]:
    ordinary = forms.ordinary
    y = jax.vmap(lambda *args: eval_jaxpr(ordinary.jaxpr, ordinary.consts, *args), in_axes=tuple(axes))(*args)
    return y, [0] * len(y)


_layer_form.def_impl(_evaluate)
_layer_form.def_abstract_eval(lambda *avals, jaxpr, forms: jaxpr.out_avals)
batching.primitive_batchers[_layer_form] = _batch
mlir.register_lowering(_layer_form, mlir.lower_fun(_evaluate, multiple_results=True))
