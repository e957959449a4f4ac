"""Convert to and from Orbax checkpoints, with Orbax itself (`pip install mlax[orbax]`)."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlax._jax import is_typed_key
from mlax.core import unflatten_paths
from mlax.train.checkpoints._manifest import flatten_with_names


def to_orbax(folder: str | os.PathLike[str], tree: Any) -> None:
    """Write a pytree as an Orbax checkpoint: nested dicts by leaf name, typed keys as their data."""
    leaves, _ = flatten_with_names(tree)
    plain = unflatten_paths(
        (name, jax.random.key_data(leaf) if is_typed_key(leaf) else leaf) for name, leaf in leaves.items()
    )
    with _import_orbax().StandardCheckpointer() as checkpointer:
        checkpointer.save(os.path.abspath(os.fspath(folder)), plain)


def from_orbax(folder: str | os.PathLike[str], target: Any) -> Any:
    """Restore an Orbax checkpoint like `target`. Leaves are matched by name, whatever containers were saved."""
    path = os.path.abspath(os.fspath(folder))
    leaves, treedef = flatten_with_names(target)
    with _import_orbax().StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(path).item_metadata
        saved, saved_treedef = flatten_with_names(getattr(metadata, "tree", metadata))
        if saved.keys() != leaves.keys():
            odd = sorted(saved.keys() ^ leaves.keys())
            raise ValueError(
                f"from_orbax: {odd[0]!r} is only {'in the target' if odd[0] in leaves else 'saved'}; pass a target "
                "with exactly the saved leaves."
            )
        wanted = {name: _abstract_leaf(name, leaves[name], saved[name]) for name in saved}
        restored, _ = flatten_with_names(checkpointer.restore(path, saved_treedef.unflatten(wanted.values())))
    return treedef.unflatten(_restore_like(restored[name], leaf) for name, leaf in leaves.items())


def _abstract_leaf(name: str, leaf: Any, saved: Any) -> Any:
    data = jax.eval_shape(jax.random.key_data, leaf) if is_typed_key(leaf) else leaf
    if tuple(saved.shape) != data.shape or np.dtype(saved.dtype) != data.dtype:
        raise ValueError(
            f"from_orbax: {name!r} was saved as {saved.dtype}{list(saved.shape)}, but the target has "
            f"{data.dtype}{list(data.shape)}; build the same model."
        )
    committed = not isinstance(leaf, jax.Array) or leaf.committed
    sharding = None if is_typed_key(leaf) or not committed else getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _restore_like(value: Any, leaf: Any) -> Any:
    if is_typed_key(leaf):
        impl = jax.random.key_impl(leaf) if isinstance(leaf, jax.Array) else None
        return jax.random.wrap_key_data(jnp.asarray(value), impl=impl)
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return jax.device_put(np.asarray(value))
    return np.asarray(value) if isinstance(leaf, np.ndarray) else value


def _import_orbax() -> Any:
    try:
        import orbax.checkpoint as orbax  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("Orbax is not installed; pip install 'mlax[orbax]'.") from None
    return orbax
