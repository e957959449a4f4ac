"""Where the arrays of a batch go, and those that cannot."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mlax.core import signature
from mlax.place._where import ways


def batch_shardings(split: PartitionSpec, mesh: Mesh, batch: Any, stacked: bool) -> Any:
    """The shardings of a batch, or of several stacked on a leading axis; refuses one that does not divide."""
    sizes = dict(mesh.shape)

    def of(path: Any, leaf: Any) -> NamedSharding:
        entries = ([None] * stacked + [*split])[: len(leaf.shape)]
        for axis, entry in enumerate(entries):
            number = ways(entry, sizes)
            if leaf.shape[axis] % number:
                place = jax.tree_util.keystr(path, simple=True, separator="/") or "the batch"
                size = leaf.shape[axis]
                raise ValueError(
                    f"{place} is {signature(leaf)}, but the plan splits its axis {axis} into {number} "
                    f"({split} over {sizes}), and {size} is no multiple of it; take "
                    f"{size // number * number or number} or {-(-size // number) * number}."
                )
        return NamedSharding(mesh, PartitionSpec(*entries))

    return jax.tree_util.tree_map_with_path(of, batch)
