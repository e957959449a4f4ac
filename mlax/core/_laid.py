"""Arrays made anew that lie over the devices as the ones they are computed with."""

from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec


def varying_like(new: Any, like: Any) -> Any:
    """The arrays of `new`, inside of `jax.shard_map` known to vary between devices wherever one of `like` does.

    A loop carries only what has the same type after each turn, and what it is computed with makes it vary.
    """
    axes = frozenset[Any]().union(*map(_varying, jax.tree.leaves(like)))

    def one(leaf: Any) -> Any:
        more = axes - _varying(leaf)
        return lax.pcast(leaf, tuple(more), to="varying") if more else leaf

    return jax.tree.map(one, new)


def laid_like(new: Any, x: Any, axis: int = 0) -> Any:
    """The arrays of `new`, varying like `x`, and the first axis of each split over an explicit mesh as its `axis` is."""
    sharding = jax.typeof(jax.tree.leaves(x)[0]).sharding
    split = sharding.spec[axis]
    where = NamedSharding(sharding.mesh, PartitionSpec(split))
    return jax.tree.map(
        lambda leaf: jax.sharding.reshard(leaf, where) if split and leaf.ndim else leaf, varying_like(new, x)
    )


def _varying(leaf: Any) -> frozenset[Any]:
    return jax.typeof(leaf).manual_axis_type.varying
