"""Gathered: a part whose split weights are put together where they are used, and taken apart again."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mlax.core import (
    Composite,
    Layer,
    Map,
    Repeat,
    Tree,
    Wrapper,
    flatten_paths,
    frozen,
    parts_of,
    unflatten_paths,
    with_fields,
)
from mlax.place._constrained import placed
from mlax.place._where import names


@frozen
class Gathered(Wrapper):
    """Compute `layer` with its weights put together over some axes of a mesh first.

    Left to itself XLA often moves the activations instead, which are larger. What is gathered is not kept for the
    backward pass, which gathers again. `specs` are the splits that are left, by path. The mesh is that of
    `jax.set_mesh`; without one this is the layer and nothing more.
    """

    specs: tuple[tuple[str, PartitionSpec], ...]

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        def run(x: Any, trainables: Tree, non_trainables: Tree, rng: jax.Array | None) -> tuple[Any, Tree]:
            whole = {path: self._whole(path, leaf) for path, leaf in flatten_paths(trainables).items()}
            return self.layer.fwd(
                x, unflatten_paths(whole.items()), non_trainables, rng=rng, inference_mode=inference_mode
            )

        return jax.checkpoint(run, policy=_all_but_gathered)(x, trainables, non_trainables, rng)

    def _whole(self, path: str, leaf: jax.Array) -> jax.Array:
        spec = dict(self.specs).get(path)
        return leaf if spec is None else placed(leaf, spec)


def gathered(layer: Layer, shardings: Tree, axes: tuple[str, ...], stacked: int = 0) -> Layer:
    """The layer with each of its parts, and the body of each Repeat or Map, gathered over these axes by itself."""
    if not shardings:
        return layer
    if isinstance(layer, Repeat) or (isinstance(layer, Map) and layer.variables == 0):
        return with_fields(layer, layer=_wrapped(layer.layer, shardings, axes, stacked + 1))
    if isinstance(layer, Wrapper):
        return with_fields(layer, layer=gathered(layer.layer, shardings, axes, stacked))
    if isinstance(layer, Composite) and type(layer).init is Composite.init:
        parts = {name: gathered(part, shardings.get(name), axes, stacked) for name, part in parts_of(layer).items()}
        return layer.with_parts({name: part for name, part in parts.items() if part != parts_of(layer)[name]})
    return _wrapped(layer, shardings, axes, stacked)


def _wrapped(layer: Layer, shardings: Tree, axes: tuple[str, ...], stacked: int) -> Layer:
    specs = [(path, _without(sharding, axes, stacked)) for path, sharding in flatten_paths(shardings).items()]
    split = tuple((path, spec) for path, spec in specs if spec is not None)
    return Gathered(layer, split) if split else layer


def _without(sharding: Sharding, axes: tuple[str, ...], stacked: int) -> PartitionSpec | None:
    """The split of one copy without these mesh axes; None if it has none of them."""
    if not isinstance(sharding, NamedSharding) or not any(set(names(entry)) & set(axes) for entry in sharding.spec):
        return None
    left = [tuple(name for name in names(entry) if name not in axes) for entry in sharding.spec]
    return PartitionSpec(*[entry[0] if len(entry) == 1 else entry or None for entry in left[stacked:]])


def _all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    """What is kept for the backward pass: everything that a change of its placement did not make."""
    return primitive.name != "sharding_constraint"
