"""What the backward pass keeps of the forward pass, by layer."""

import collections
import math
from collections.abc import Callable, Collection
from typing import Any

import jax

from mlax._jax import layer_path
from mlax.core import Tree


def kept_by_layer(loss: Callable[[Tree], Any], trainables: Tree, paths: Collection[str]) -> dict[str, int]:
    """The bytes that are kept for the backward pass, by the path of the layer that made them, for the whole batch.

    `paths` are those of the layers that there are.

    They are read off the jaxpr: nothing is computed. What XLA makes of them can be less, or more.
    """

    def residuals(trainables: Tree) -> list[jax.Array]:
        return [leaf for leaf in jax.tree.leaves(jax.vjp(loss, trainables)[1]) if isinstance(leaf, jax.Array)]

    jaxpr = jax.make_jaxpr(residuals)(trainables).jaxpr
    found: dict[str, int] = collections.defaultdict(int)
    for result in {id(result): result for result in jaxpr.outvars}.values():
        origin = _origin(jaxpr, result, ())
        if origin is not None:
            # the numbers in a path are those of unrolled layers, whose weights are one stack
            layer = "/".join(name for name in origin.split("/") if not name.isdigit())
            found[_whole(layer, paths)] += math.prod(result.aval.shape) * result.aval.dtype.itemsize
    return dict(found)


def _whole(path: str, paths: Collection[str]) -> str:
    """The path of a layer, found again by its end for what JAX took out of a loop without the names around that."""
    ends = [] if path in paths else [each for each in paths if each.endswith(f"/{path}")]
    return path if not ends else ends[0] if len(ends) == 1 else ""


def _origin(jaxpr: Any, result: Any, around: tuple[Any, ...]) -> str | None:
    """The path of the layer that made a value; None for what is given, as weights are."""
    maker = next((each for each in jaxpr.eqns if any(result is made for made in each.outvars)), None)
    if maker is None:
        return layer_path(around) if around else None
    place = next(place for place, made in enumerate(maker.outvars) if made is result)
    inner = maker.params.get("jaxpr")
    if inner is not None and maker.primitive.name in ("scan", "jit", "pjit", "checkpoint", "remat2"):
        inner = getattr(inner, "jaxpr", inner)
        return _origin(inner, inner.outvars[place], (*around, maker))
    return layer_path((*around, maker))
