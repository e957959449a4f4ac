"""Shard new arrays like the arrays they are combined with."""

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec


def pcast_like(new: Any, like: Any) -> Any:
    """`lax.pcast` the arrays of `new` to varying over the manual mesh axes that any array of `like` varies over.

    The carry of a loop inside `jax.shard_map` must have one type, and what it is combined with makes it vary.
    """
    axes = frozenset[Any]().union(*map(varying_axes, jax.tree.leaves(like)))

    def one(leaf: Any) -> Any:
        more = axes - varying_axes(leaf)
        return lax.pcast(leaf, tuple(more), to="varying") if more else leaf

    return jax.tree.map(one, new)


def shard_like(new: Any, x: Any, axis: int = 0) -> Any:
    """The arrays of `new`, varying like `x`; on an explicit mesh, their first axis is sharded like `axis` of `x`."""
    sharding = explicit_sharding(jax.tree.leaves(x)[0], (axis,))
    new = pcast_like(new, x)
    if sharding is None:
        return new
    first = NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[axis]))
    return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, first) if leaf.ndim else leaf, new)


def explicit_sharding(x: Any, axes: Collection[int] | None = None) -> NamedSharding | None:
    """The sharding of `x` over explicit mesh axes, restricted to its array axes `axes`; None if it is not sharded.

    It is for the `out_sharding` of JAX's functions, which only explicit mesh axes require.
    """
    sharding = jax.typeof(x).sharding
    spec = [entry if axes is None or axis in axes else None for axis, entry in enumerate(sharding.spec)]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec)) if any(spec) else None


def is_unsharded_cpu(x: Any) -> bool:
    """Whether the backend is the CPU and `x` is not sharded, nor could be by GSPMD."""
    sharding = jax.typeof(x).sharding
    return jax.default_backend() == "cpu" and not sharding.mesh.auto_axes and not any(sharding.spec)


def with_auto_axes(function: Callable[..., Any], *arrays: Any, like: Any) -> Any:
    """`function(*arrays)`, a tree of arrays sharded like those of `like`, with the sharding in between left to XLA.

    Explicit axes need an `out_sharding` for each product; here GSPMD chooses.
    """
    shardings = [jax.typeof(leaf).sharding for leaf in jax.tree.leaves((arrays, like))]
    names = {name for sharding in shardings for entry in sharding.spec for name in _axis_names(entry)}
    if not names:
        return function(*arrays)
    out_sharding = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding, like)
    return jax.sharding.auto_axes(function, axes=tuple(sorted(names)), out_sharding=out_sharding)(*arrays)


def _axis_names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def varying_axes(leaf: Any) -> frozenset[Any]:
    """The manual mesh axes of `jax.shard_map` that the array varies over."""
    return jax.typeof(leaf).manual_axis_type.varying
