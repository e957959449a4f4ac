"""Orbax checkpoints, written and read by Orbax itself (`pip install mlax[orbax]`)."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlax.core import unflatten_paths
from mlax.train.checkpoints._manifest import flatten_with_names


def to_orbax(folder: str | os.PathLike[str], tree: Any) -> None:
    """Write a tree as an Orbax checkpoint: nested dicts by the names that a checkpoint of mlax has; keys as data."""
    leaves, _ = flatten_with_names(tree)
    plain = unflatten_paths(
        (name, jax.random.key_data(leaf) if _is_key(leaf) else leaf) for name, leaf in leaves.items()
    )
    with _import_orbax().StandardCheckpointer() as checkpointer:
        checkpointer.save(os.path.abspath(os.fspath(folder)), plain)


def from_orbax(folder: str | os.PathLike[str], target: Any) -> Any:
    """The tree in an Orbax checkpoint, like `target`. Leaves are found by their names, whatever containers it has."""
    path = os.path.abspath(os.fspath(folder))
    leaves, structure = flatten_with_names(target)
    with _import_orbax().StandardCheckpointer() as checkpointer:
        there = checkpointer.metadata(path).item_metadata
        kept, outside = flatten_with_names(getattr(there, "tree", there))
        if kept.keys() != leaves.keys():
            odd = sorted(kept.keys() ^ leaves.keys())
            raise ValueError(
                f"from_orbax: {odd[0]!r} is {'in the target' if odd[0] in leaves else 'saved'} only; give a target "
                "with the leaves that were saved."
            )
        wanted = {name: _abstract_leaf(name, leaves[name], kept[name]) for name in kept}
        found, _ = flatten_with_names(checkpointer.restore(path, outside.unflatten(wanted.values())))
    return structure.unflatten(_restore_like(found[name], leaf) for name, leaf in leaves.items())


def _abstract_leaf(name: str, leaf: Any, saved: Any) -> Any:
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    if tuple(saved.shape) != data.shape or np.dtype(saved.dtype) != data.dtype:
        raise ValueError(
            f"from_orbax: {name!r} was saved as {saved.dtype}{list(saved.shape)}, but the target has "
            f"{data.dtype}{list(data.shape)}; build the same model."
        )
    committed = not isinstance(leaf, jax.Array) or leaf.committed
    sharding = None if _is_key(leaf) or not committed else getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _restore_like(value: Any, leaf: Any) -> Any:
    if _is_key(leaf):
        impl = jax.random.key_impl(leaf) if isinstance(leaf, jax.Array) else None
        return jax.random.wrap_key_data(jnp.asarray(value), impl=impl)
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return jax.device_put(np.asarray(value))
    return np.asarray(value) if isinstance(leaf, np.ndarray) else value


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _import_orbax() -> Any:
    try:
        import orbax.checkpoint as orbax  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("Orbax is not installed; pip install 'mlax[orbax]'.") from None
    return orbax
