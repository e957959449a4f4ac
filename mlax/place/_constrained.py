"""Constrained: a part whose output is split over a mesh as one says."""

import jax
from jax.sharding import PartitionSpec

from mlax.core import Layer, Wrapper, frozen, layers, replace, short_repr, signature
from mlax.place._noticed import notice
from mlax.place._rules import Rules, joined
from mlax.place._where import names, ways


@frozen
class Constrained(Wrapper):
    """Compute `layer`, and have its output lie over the mesh as `split` says, cut to the axes of each array.

    The mesh is that of `jax.set_mesh`, as a step with a plan sets it. Without one that has these axes this is the layer
    and nothing more.
    """

    split: PartitionSpec

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y, new = self.layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return jax.tree.map(self._constrain, y), new

    def _constrain(self, leaf: jax.Array) -> jax.Array:
        entries = self.split[: leaf.ndim]
        sizes = dict(jax.sharding.get_abstract_mesh().shape)
        for axis, entry in enumerate(entries if is_set(self.split) else ()):
            number = ways(entry, sizes)
            if leaf.shape[axis] % number:
                raise ValueError(
                    f"{short_repr(self.layer)} gives {signature(leaf)}, whose axis {axis} is to be split into "
                    f"{number} by "
                    f"{self.split}, which leaves {leaf.shape[axis] % number} over; take a multiple of {number}."
                )
        return placed(leaf, PartitionSpec(*entries))


def is_set(split: PartitionSpec) -> bool:
    """Whether a mesh is set that has the axes of a split, and they are not those of a `jax.shard_map` around."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name for entry in split for name in names(entry)} <= {*mesh.axis_names} - {*mesh.manual_axes}


def placed(leaf: jax.Array, split: PartitionSpec) -> jax.Array:
    """The array split over the mesh that is set, if it has the axes."""
    notice()
    known = jax.sharding.get_abstract_mesh().axis_names and is_set(split)
    return jax.lax.with_sharding_constraint(leaf, split) if known else leaf


def constrained(model: Layer, rules: Rules) -> Layer:
    """The model with what the rules say of its parts' outputs; the pattern "" stands for the model itself."""
    parts = {"": model, **layers(model)}
    for path, said in rules.found(parts, "activations").items():
        split = PartitionSpec()
        for where in said:
            if not isinstance(where.split, PartitionSpec):
                raise TypeError(f"the rule for activations says {where} of {path!r}, but must say a PartitionSpec.")
            split = joined(split, where.split)
        if not said:
            continue
        part = layers(model)[path] if path else model
        model = replace(model, path, Constrained(part, split)) if path else Constrained(part, split)
    return model
