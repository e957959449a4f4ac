"""Leaves of pytrees by path, and arithmetic over all leaves."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mlax._jax._memory import plan_chunks, sum_chunks, to_device

SMALL = 2**19  # elements of a leaf that is summed together with others on a GPU


def leaves_with_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """(path, leaf) of each leaf of a pytree; keys, field names and indices are joined by slashes: `mean/0/up`."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(jax.tree_util.keystr(keys, simple=True, separator="/"), leaf) for keys, leaf in found]


def partition_inexact(tree: Any) -> tuple[list[Any], Callable[..., Any]]:
    """The floating-point leaves of a pytree, and a function that puts others back in their place.

    `combine(leaves)` keeps the leaves that have no gradient, integers and keys; `combine(leaves, other)` replaces each
    of them by `other`.
    """
    leaves, structure = jax.tree.flatten(tree)
    is_inexact = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def combine(inexact: list[Any], *other: Any) -> Any:
        remaining = iter(inexact)
        pairs = zip(leaves, is_inexact, strict=True)
        return structure.unflatten([next(remaining) if chosen else (*other, leaf)[0] for leaf, chosen in pairs])

    return [leaf for leaf, chosen in zip(leaves, is_inexact, strict=True) if chosen], combine


def global_norm(leaves: Mapping[str, jax.Array]) -> jax.Array:
    """The Euclidean norm of all leaves together, in the widest of their dtypes and float32, in any memory."""
    cut = plan_chunks({path: [leaf] for path, leaf in leaves.items()})
    apart = {path for paths, _ in cut for path in paths}
    rest = to_device({path: leaf for path, leaf in leaves.items() if path not in apart})
    total = tree_vdot(rest, rest).astype(widest_dtype(leaf.dtype for leaf in leaves.values()))
    for paths, number in cut:
        total = sum_chunks(lambda piece: tree_vdot(piece, piece), {path: leaves[path] for path in paths}, number, total)
    return jnp.sqrt(total)


def tree_vdot(a: Mapping[str, jax.Array], b: Mapping[str, jax.Array]) -> jax.Array:
    """The sum of the elementwise products, in the widest of the dtypes and float32."""
    wide = widest_dtype(leaf.dtype for leaf in a.values())
    total = jnp.zeros((), wide)
    a, b = _join_small_leaves(a, b, wide)
    for path, leaf in a.items():
        total = total + jnp.sum(leaf.astype(wide) * b[path].astype(wide))
    return total


def _join_small_leaves(
    a: Mapping[str, jax.Array], b: Mapping[str, jax.Array], dtype: Any
) -> tuple[Mapping[str, jax.Array], Mapping[str, jax.Array]]:
    """Both trees with their small leaves in one vector, on a GPU, where each sum of its own takes one kernel or two.

    XLA reads the leaves in the kernel that sums, and concatenates nothing in memory. Leaves of programs for a mesh stay
    apart, since concatenating shards would gather them.
    """
    small = [path for path, leaf in a.items() if leaf.size <= SMALL and jax.typeof(leaf).sharding.mesh.empty]
    if jax.default_backend() != "gpu" or len(small) < 2:
        return a, b

    def join(leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        vector = jnp.concatenate([leaves[path].astype(dtype).reshape(-1) for path in small])
        return {"": vector, **{path: leaf for path, leaf in leaves.items() if path not in small}}

    joined = join(a)
    return joined, joined if b is a else join(b)


def count_non_finite(leaves: Mapping[str, jax.Array]) -> jax.Array:
    """The number of leaves with a NaN or an infinity."""
    found = jnp.zeros((), jnp.int32)
    for leaf in leaves.values():
        found = found + (~jnp.all(jnp.isfinite(leaf))).astype(jnp.int32)
    return found


def all_stay_finite(before: Any, after: Any) -> jax.Array:
    """Whether no floating element that was finite became NaN or infinite, () bool; the trees have equal structures."""
    finite = jnp.ones((), bool)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if jnp.issubdtype(new.dtype, jnp.inexact):
            finite = finite & jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old))
    return finite


def cast_scalar(number: Any, like: jax.Array) -> jax.Array:
    """A number as an array of the dtype of `like`."""
    return jnp.asarray(number).astype(like.dtype)


def at_least_float32(dtype: Any) -> Any:
    """The dtype, or float32 if it is narrower."""
    return widest_dtype([dtype])


def widest_dtype(dtypes: Iterable[Any]) -> Any:
    """The widest of float32 and these floating dtypes."""
    return max([jnp.dtype("float32"), *map(jnp.dtype, dtypes)], key=lambda dtype: dtype.itemsize)
