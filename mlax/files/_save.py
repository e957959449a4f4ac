"""save: write a pytree of arrays to one safetensors file."""

import errno
import io
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from mlax._jax import is_typed_key
from mlax.core import Layer, check_not_donated, unflatten_paths
from mlax.files._io import InvalidFile, atomic_write, require_space
from mlax.files._safetensors import (
    MAX_AXES,
    SAFETENSORS_DTYPE_NAMES,
    byte_view,
    encode_header,
    is_storable,
    name_error,
    read_header,
    serialize,
    to_file_layout,
)


def save(path: str | os.PathLike[str], tree: Any, metadata: Mapping[str, str] | None = None) -> None:
    """Write nested dicts of arrays to one safetensors file; the leaf at `tree["a"]["b"]` is the array `a/b`.

    Atomic: the file is written under a temporary name, synced, then renamed, so that `path` is at any moment the old
    file or the complete new one. Raises `NotEnoughSpace` if the disk is too full.
    """
    path = os.fspath(path)
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise FileNotFoundError(errno.ENOENT, "files.save: no such folder; create it first, with os.makedirs", folder)
    check_not_donated("files.save", tree=tree)
    arrays: dict[str, np.ndarray] = {}
    for name, leaf in _named_leaves(tree, ""):
        if name in arrays:
            raise ValueError(f"files.save: two leaves are named {name!r}; rename one of them.")
        arrays[name] = _to_numpy(name, leaf)
    try:
        unflatten_paths(arrays.items())
    except ValueError as error:
        raise ValueError(f"files.save: {error}") from None
    metadata = dict(metadata or {})
    if not all(isinstance(text, str) for item in metadata.items() for text in item):
        raise TypeError("files.save: metadata must be a dict of strings; convert its values, with json.dumps say.")
    file = serialize(arrays, metadata)
    try:
        read_header(io.BytesIO(file.header), file.size, path)
    except InvalidFile as error:  # it is within the format, but not within the limits of `load`
        raise ValueError(f"files.save: {error} Write several files.") from None
    with require_space(path, file.size):
        atomic_write(path, [file.header, *file.arrays.values()])


class LazyArray(NamedTuple):
    """An array that is computed when it is written."""

    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def save_lazily(path: str, arrays: Mapping[str, LazyArray], metadata: Mapping[str, str]) -> None:
    """Like `save`, but with one array in memory at a time."""
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))  # so that each is aligned
    header = encode_header(((name, arrays[name].dtype, arrays[name].shape) for name in order), metadata)
    size = len(header) + sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays.values())
    read_header(io.BytesIO(header), size, path)  # within the limits of `load`
    with require_space(path, size):
        atomic_write(path, itertools.chain([header], (_read_bytes(arrays[name], name) for name in order)))


def _read_bytes(lazy: LazyArray, name: str) -> memoryview:
    array = lazy.read()
    if (array.dtype, array.shape) != (lazy.dtype, lazy.shape):
        raise ValueError(f"{name!r} is {array.dtype}{list(array.shape)}, not {lazy.dtype}{list(lazy.shape)}.")
    return byte_view(to_file_layout(array))


def _named_leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        wanted = f"files.save: the tree is a {type(tree).__name__}, but must be nested dicts of arrays; "
        if isinstance(tree, Layer):
            raise TypeError(wanted + "a layer has no variables: save those that init returns.")
        if hasattr(tree, "trainables"):
            raise TypeError(wanted + "save state.trainables, or the whole state with train.Checkpoints.")
        raise TypeError(wanted + 'name it: {"name": ...}.')
    for key, value in tree.items():
        if not isinstance(key, str):
            raise TypeError(f"files.save: the key {key!r} in {path or 'the tree'!r} is not a string; rename it.")
        name = f"{path}/{key}" if path else key
        if reason := name_error(name):
            raise ValueError(f"files.save: {name[:100]!r} is not a valid array name: {reason}; rename it.")
        if isinstance(value, Mapping):
            yield from _named_leaves(value, name)
        elif value is not None:
            yield name, value


def _to_numpy(name: str, leaf: Any) -> np.ndarray:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"files.save: {name!r} is a {type(leaf).__name__}, not an array; pass nested dicts of arrays.")
    if is_typed_key(leaf):
        raise TypeError(f"files.save: {name!r} holds typed keys; save jax.random.key_data of them.")
    array = to_file_layout(np.asarray(leaf))
    if not is_storable(array.dtype):
        raise TypeError(
            f"files.save: {name!r} is {array.dtype}, which safetensors does not support; cast it to one of "
            f"{', '.join(str(dtype) for dtype in SAFETENSORS_DTYPE_NAMES)}."
        )
    if array.ndim > MAX_AXES:
        raise ValueError(f"files.save: {name!r} has {array.ndim} axes, and at most {MAX_AXES} are allowed; reshape it.")
    return array
