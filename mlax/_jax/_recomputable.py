"""An array that `layer_scan` may recompute in the backward pass instead of storing it."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

RECOMPUTABLE = "recomputable"  # the name of the primitive


def recomputable(y: Any, compute: Callable[..., Any], *inputs: Any) -> Any:
    """Return `y`, which equals `compute(*inputs)` and has the same derivatives.

    `layer_scan` recomputes it so in the backward pass, if the inputs are available there. `compute` closes over no
    tracers, and is traced only where it is used. Under `vmap` the result is `y` alone.
    """
    flat, tree = jax.tree.flatten(inputs)
    return _recomputable.bind(y, *flat, compute=compute, tree=tree)


_recomputable = Primitive(RECOMPUTABLE)
_recomputable.def_impl(lambda y, *inputs, **params: y)
_recomputable.def_abstract_eval(lambda y, *inputs, **params: y)
ad.primitive_jvps[_recomputable] = lambda args, dots, **params: (_recomputable.bind(*args, **params), dots[0])
batching.primitive_batchers[_recomputable] = lambda args, axes, **params: (args[0], axes[0])
mlir.register_lowering(_recomputable, lambda context, y, *inputs, **params: [y])
