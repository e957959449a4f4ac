"""An array that comes with how to compute it again, so that `layer_scan` need not store it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

RECOMPUTABLE = "recomputable"  # the name of the primitive


def recomputable(y: Any, compute: Callable[..., Any], *inputs: Any) -> Any:
    """`y`, with the derivatives of `y`, which `compute(*inputs)` gives, too, with the same derivatives.

    So `layer_scan` computes it in the backward pass, if it has the inputs there. `compute` closes over no tracers and
    is traced only where it is used. Under `vmap` it is `y` alone.
    """
    flat, tree = jax.tree.flatten(inputs)
    return _recomputable.bind(y, *flat, recomputation=Recomputation(compute, tree))


@dataclasses.dataclass(frozen=True, eq=False)
class Recomputation:
    function: Callable[..., Any]
    tree: Any  # of its inputs

    def compute(self, *flat: Any) -> Any:
        return self.function(*self.tree.unflatten(flat))


_recomputable = Primitive(RECOMPUTABLE)
_recomputable.def_impl(lambda y, *inputs, recomputation: y)
_recomputable.def_abstract_eval(lambda y, *inputs, recomputation: y)
ad.primitive_jvps[_recomputable] = lambda args, dots, **params: (_recomputable.bind(*args, **params), dots[0])
batching.primitive_batchers[_recomputable] = lambda args, axes, *, recomputation: (args[0], axes[0])
mlir.register_lowering(_recomputable, lambda context, y, *inputs, recomputation: [y])
