"""load: the tree of arrays in a safetensors file, or in the files that an index names."""

import mmap
import os
from typing import Any

import numpy as np

from mlax.core import unflatten_paths
from mlax.files._header import Entry, read_header
from mlax.files._index import read_index
from mlax.files._opened import opened
from mlax.files._refused import Refused


def load(path: str | os.PathLike[str], *, within: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The nested dicts of NumPy arrays in a safetensors file, read-only and mapped into memory where they lie.

    The file may come from a stranger: what is not exactly right is refused, in words. A path that ends in `.json` is
    an index (`model.safetensors.index.json`): the files that it names are read from its own folder. Links are
    followed to places in the file's folder only, or in `within`: a cache of downloads, say.
    """
    path, within = os.fspath(path), os.fspath(within) if within is not None else None
    arrays = _listed(path, within) if path.endswith(".json") else _arrays(path, within)
    try:
        return unflatten_paths(arrays.items()) or {}
    except ValueError as failure:
        raise Refused(f"{path}: {failure}") from None


def metadata(path: str | os.PathLike[str], *, within: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """The words that a safetensors file carries beside its arrays."""
    path = os.fspath(path)
    with opened(path, os.fspath(within) if within is not None else None) as (file, size):
        return read_header(file, size, path).metadata


def _arrays(path: str, within: str | None) -> dict[str, np.ndarray]:
    with opened(path, within) as (file, size):
        entries = read_header(file, size, path).entries
        data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    return {name: _array(data, name, entry, path) for name, entry in entries.items()}


def _array(data: mmap.mmap, name: str, entry: Entry, path: str) -> np.ndarray:
    if entry.start == entry.stop:
        return np.empty(entry.shape, entry.dtype)
    array = np.frombuffer(data, np.uint8, entry.stop - entry.start, entry.start)
    if entry.dtype == np.bool_ and array.max() > 1:
        raise Refused(f"{path}, array {name!r}: {array.max()} is no boolean; they are 0 or 1.")
    return np.require(array.view(entry.dtype).reshape(entry.shape), requirements="A")  # a copy if it is not aligned


def _listed(path: str, within: str | None) -> dict[str, np.ndarray]:
    places = read_index(path, within)
    folder = os.path.dirname(os.path.abspath(path))
    files = {file: _arrays(os.path.join(folder, file), within) for file in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in files[file]:
            raise Refused(f"{path}: it says that {name!r} is in {file}, but it is not.")
    return {name: files[file][name] for name, file in places.items()}
