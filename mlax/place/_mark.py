"""An equation that stands in a jaxpr where a pipeline belongs."""

from typing import Any

import jax
from jax.extend.core import Primitive

from mlax.core import Tree

MARK = Primitive("pipelined")
MARK.multiple_results = True


def marked(layer: Any, x: Any, trainables: Tree, rng: jax.Array | None, inference_mode: bool) -> Any:
    """What `layer`, a `Pipelined`, would give, not computed: whoever traced this puts the pipeline in its place."""
    leaves, tree = jax.tree.flatten((x, trainables, rng))
    out = MARK.bind(*leaves, layer=layer, tree=tree, inference_mode=inference_mode)
    return jax.tree.unflatten(jax.tree.structure(x), out)


@MARK.def_abstract_eval
def _(*leaves: Any, layer: Any, tree: Any, inference_mode: bool) -> list[Any]:
    x, _, _ = jax.tree.unflatten(tree, leaves)
    return jax.tree.leaves(x)
