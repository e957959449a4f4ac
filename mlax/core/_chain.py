"""Chain, equal layers with separate variables, and `unstack`, which makes one of each Repeat."""

from typing import Any

import jax
from jax import lax
from jax.core import Tracer

from mlax.core._composite import Composite, Sub
from mlax.core._errors import is_like_first
from mlax.core._frozen import frozen, with_fields
from mlax.core._layer import Layer, Tree
from mlax.core._parts import check_layer, parts_of
from mlax.core._paths import STACKED, flatten_paths, stacked_axes, unflatten_paths
from mlax.core._wrappers import Repeat, Wrapper


@frozen
class Chain(Composite):
    """Layers one after another, each with separate variables: a Repeat whose variables are not stacked.

    Of several inputs, (x, t), the output of a layer may be like the first alone: it becomes the x of the next layer,
    and every layer gets the same t. Variables: those of each layer, under layers/0, layers/1, ...

    >>> model, x = mlax.Chain((nn.Linear(16), nn.Linear(16))), jnp.ones((8, 16))
    >>> trainables, _ = model.init(jax.random.key(0), x)
    >>> mlax.get(trainables, "layers/1/kernel").shape
    (16, 16)
    """

    layers: tuple[Layer, ...]  # the first one first

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple) or not self.layers:
            raise TypeError(f"Chain: layers is {self.layers!r}, but must be a tuple of layers, at least one.")

    def wire(self, sub: Sub, *inputs: Any) -> Any:
        y: Any = None
        for layer in sub.layers:
            y = layer(*inputs)
            inputs = (y, *inputs[1:]) if len(inputs) == 1 or is_like_first(y, inputs) else y
        return y


def unstack(model: Layer, *variables: Tree) -> tuple[Any, ...]:
    """A model with a Chain in place of each Repeat, and its variables, each layer's apart: (model, *variables).

        model, trainables = mlax.unstack(model, trainables)

    The outputs are the same. A layer's weights and state are then separate arrays, which a loop over tokens updates in
    place, where it would copy a stack of caches; `zoo.generate` unstacks by itself, and copies nothing if that is done.
    A leaf blocks/stacked/norm/scale becomes blocks/layers/0/norm/scale, ... A Repeat that another wrapper computes in
    its own way, as `place.Stream` does, stays.
    """
    check_layer("unstack", "the model", model)
    repeats: dict[str, int] = {}
    model = _unstack_model(model, "", repeats)
    return model, *(_unstack_variables(tree, repeats) for tree in variables)


def _unstack_model(layer: Layer, path: str, repeats: dict[str, int]) -> Any:
    """The model; `repeats` collects the number of layers of each Repeat, by its path, those inside of others first."""
    if isinstance(layer, Repeat):
        inner = _unstack_model(layer.layer, _join(path, STACKED), repeats)
        repeats[path] = layer.times
        return Chain((inner,) * layer.times)
    if isinstance(layer, Wrapper):
        if layer.needs_repeat:
            return layer
        below = _join(path, STACKED) if layer.has_stack else path
        inner = _unstack_model(layer.layer, below, repeats)
        return layer if inner == layer.layer else with_fields(layer, layer=inner)
    if isinstance(layer, Composite):
        parts = {
            name: (part, _unstack_model(part, _join(path, name), repeats)) for name, part in parts_of(layer).items()
        }
        changed = {name: new for name, (old, new) in parts.items() if new != old}
        return layer.with_parts(changed) if changed else layer
    return layer


def _unstack_variables(tree: Tree, repeats: dict[str, int]) -> Tree:
    leaves = flatten_paths(tree)
    for path, times in repeats.items():
        stack, axis = f"{_join(path, STACKED)}/", stacked_axes(path)
        for name in [name for name in leaves if name.startswith(stack)]:
            leaf, rest = leaves.pop(name), name.removeprefix(stack)
            if leaf.shape[axis : axis + 1] != (times,):
                raise ValueError(
                    f"unstack: {name} has the shape {leaf.shape}, but the Repeat has {times} layers; pass the "
                    "variables of this model."
                )
            for index in range(times):
                leaves[f"{_join(path, 'layers')}/{index}/{rest}"] = _take(leaf, index, axis)
    return unflatten_paths(leaves.items())


def _take(leaf: Any, index: int, axis: int) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((*leaf.shape[:axis], *leaf.shape[axis + 1 :]), leaf.dtype)
    if isinstance(leaf, Tracer):
        return lax.index_in_dim(leaf, index, axis, keepdims=False)
    return lax.dynamic_index_in_dim(leaf, index, axis, keepdims=False)  # compiled once for all indices


def _join(*names: str) -> str:
    return "/".join(filter(None, names))
