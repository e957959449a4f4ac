"""save: one safetensors file of a tree of arrays."""

import errno
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlax.core import Layer, unflatten_paths
from mlax.files._io import atomic_write, require_space
from mlax.files._safetensors import (
    DTYPE_NAMES,
    MAX_ARRAYS,
    MAX_AXES,
    MAX_HEADER_BYTES,
    is_storable,
    name_error,
    serialize,
    to_file_layout,
)


def save(path: str | os.PathLike[str], tree: Any, metadata: Mapping[str, str] | None = None) -> None:
    """Write nested dicts of arrays to one safetensors file; the leaf at a, then b, is the array `a/b`.

    The file is written under another name, synced and then renamed, so that at `path` there is the old file or the
    whole new one at any moment. `NotEnoughSpace` says how much is missing.
    """
    path = os.fspath(path)
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            errno.ENOENT, "files.save: there is no such folder; make it first, by os.makedirs", folder
        )
    arrays: dict[str, np.ndarray] = {}
    for name, leaf in _named_leaves(tree, ""):
        if name in arrays:
            raise ValueError(f"files.save: two leaves are called {name!r}; rename one of them.")
        arrays[name] = _to_numpy(name, leaf)
    try:
        unflatten_paths(arrays.items())
    except ValueError as failure:
        raise ValueError(f"files.save: {failure}") from None
    words = dict(metadata or {})
    if not all(isinstance(word, str) for pair in words.items() for word in pair):
        raise TypeError("files.save: metadata are strings by name; turn the values into strings, by json.dumps say.")
    file = serialize(arrays, words)
    if len(file.header) > MAX_HEADER_BYTES or len(arrays) > MAX_ARRAYS:
        raise ValueError(f"files.save: {len(arrays):,} arrays are too many for one file; write several.")
    with require_space(path, file.size):
        atomic_write(path, [file.header, *file.arrays.values()])


def _named_leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        came = f"files.save: a {type(tree).__name__} came, but a file holds nested dicts of arrays; "
        if isinstance(tree, Layer):
            raise TypeError(came + "a model has none: save its variables, as init returns them.")
        if hasattr(tree, "trainables"):
            raise TypeError(came + "save state.trainables, or all of the state by train.Checkpoints.")
        raise TypeError(came + "give it a name.")
    for key, value in tree.items():
        if not isinstance(key, str):
            raise TypeError(f"files.save: the key {key!r} in {path or 'the tree'!r} is no string; rename it.")
        name = f"{path}/{key}" if path else key
        if why := name_error(name):
            raise ValueError(f"files.save: {name[:100]!r} is no name for an array; {why}; rename it.")
        if isinstance(value, Mapping):
            yield from _named_leaves(value, name)
        elif value is not None:
            yield name, value


def _to_numpy(name: str, leaf: Any) -> np.ndarray:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"files.save: {name!r} is a {type(leaf).__name__}, which is no array; nest dicts of them.")
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TypeError(f"files.save: {name!r} holds typed keys; save jax.random.key_data of them.")
    array = to_file_layout(np.asarray(leaf))
    if not is_storable(array.dtype):
        raise TypeError(
            f"files.save: {name!r} is {array.dtype}, which safetensors does not have; cast it to one of "
            f"{', '.join(str(dtype) for dtype in DTYPE_NAMES)}."
        )
    if array.ndim > MAX_AXES:
        raise ValueError(f"files.save: {name!r} has {array.ndim} axes, and {MAX_AXES} are allowed; reshape it.")
    return array
