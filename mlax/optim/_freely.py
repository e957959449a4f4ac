"""freely: a function of whole matrices, whatever axes of theirs are sharded."""

from collections.abc import Callable
from typing import Any

import jax


def freely(function: Callable[..., Any], *arrays: Any, like: Any) -> Any:
    """`function(*arrays)`, a tree of arrays laid out as those of `like` are, with the compiler free in between.

    Where axes are sharded explicitly, JAX asks how each product shall lie. Inside of here XLA decides.
    """
    shardings = [jax.typeof(leaf).sharding for leaf in jax.tree.leaves((arrays, like))]
    names = {name for sharding in shardings for entry in sharding.spec for name in _names(entry)}
    if not names:
        return function(*arrays)
    laid = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding, like)
    return jax.sharding.auto_axes(function, axes=tuple(sorted(names)), out_sharding=laid)(*arrays)


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
