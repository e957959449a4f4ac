"""Exchanged: a part that is split by experts, within a model that is split by examples."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from mlax.core import Layer, Map, Wrapper, frozen, map_layers
from mlax.place._constrained import placed
from mlax.place._where import names


@frozen
class Exchanged(Wrapper):
    """Compute `layer` with its input and output split as `inside`, where all around it is split as `outside`.

    So each device sends what it has for the experts of the others, and gets back what they made of it. Left to itself
    XLA gathers the experts, or everything. The mesh is that of `jax.set_mesh`; without one this is the layer and
    nothing more.
    """

    inside: PartitionSpec
    outside: PartitionSpec

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        def split(leaf: jax.Array, first: PartitionSpec, then: PartitionSpec) -> jax.Array:
            return placed(placed(leaf, first), then)

        x = jax.tree.map(lambda leaf: split(leaf, self.outside, self.inside), x)
        y, new = self.layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return jax.tree.map(lambda leaf: split(leaf, self.inside, self.outside), y), new


def exchanged(model: Layer, batch: PartitionSpec, axes: tuple[str, ...]) -> Layer:
    """The model with its experts, which lie over these axes of the mesh, exchanging examples that do so too."""
    outside = PartitionSpec(*batch[:1])
    rest = tuple(name for entry in outside for name in names(entry) if name not in axes)

    def changed(where: str, layer: Layer) -> Layer:
        if isinstance(layer, Exchanged):
            return layer.layer  # which was changed before
        if not isinstance(layer, Map) or layer.variables != 0:
            return layer
        entries: list[Any] = [rest or None, *[None] * (layer.axis - 1), axes]
        return Exchanged(layer, PartitionSpec(*entries), outside)

    return map_layers(model, "", changed)
