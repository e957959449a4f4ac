"""load: read a pytree of arrays from a safetensors file, or from the files of an index."""

import mmap
import os
from typing import Any

import numpy as np

from mlax.core import unflatten_paths
from mlax.files._io import InvalidFile, parse_json, safe_open
from mlax.files._safetensors import MAX_HEADER_BYTES, Entry, name_error, read_header


def load(path: str | os.PathLike[str], *, within: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Load the nested dicts of NumPy arrays in a safetensors file, memory-mapped and read-only.

    The file may be untrusted: it is validated in full, and an invalid one raises `InvalidFile`. A path that ends in
    `.json` is an index (`model.safetensors.index.json`), whose files are read from its own folder. Symbolic links may
    only lead to files inside the file's folder, or inside `within`, such as a download cache.
    """
    path, within = os.fspath(path), os.fspath(within) if within is not None else None
    arrays = _load_index(path, within) if path.endswith(".json") else _load_file(path, within)
    try:
        return unflatten_paths(arrays.items()) or {}
    except ValueError as error:
        raise InvalidFile(f"{path}: {error}") from None


def metadata(path: str | os.PathLike[str], *, within: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """The metadata of a safetensors file: a dict of strings."""
    path = os.fspath(path)
    with safe_open(path, os.fspath(within) if within is not None else None) as (file, size):
        return read_header(file, size, path).metadata


def _load_file(path: str, within: str | None) -> dict[str, np.ndarray]:
    with safe_open(path, within) as (file, size):
        entries = read_header(file, size, path).entries
        data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    return {name: _view_array(data, name, entry, path) for name, entry in entries.items()}


def _view_array(data: mmap.mmap, name: str, entry: Entry, path: str) -> np.ndarray:
    if entry.start == entry.stop:
        return np.empty(entry.shape, entry.dtype)
    array = np.frombuffer(data, np.uint8, entry.stop - entry.start, entry.start)
    if entry.dtype == np.bool_ and array.max() > 1:
        raise InvalidFile(f"{path}, array {name!r}: it is boolean but contains {array.max()}; only 0 and 1 are valid.")
    return np.require(array.view(entry.dtype).reshape(entry.shape), requirements="A")  # a copy if it is not aligned


def _load_index(path: str, within: str | None) -> dict[str, np.ndarray]:
    weight_map = _read_index(path, within)
    folder = os.path.dirname(os.path.abspath(path))
    files = {file: _load_file(os.path.join(folder, file), within) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in files[file]:
            raise InvalidFile(f"{path}: it lists {name!r} in {file}, which does not contain it.")
    return {name: files[file][name] for name, file in weight_map.items()}


def _read_index(path: str, within: str | None) -> dict[str, str]:
    """The file of each array: plain names of files beside the index."""
    with safe_open(path, within) as (file, size):
        if size > MAX_HEADER_BYTES:
            raise InvalidFile(f"{path}: the index has {size:,} bytes, and at most {MAX_HEADER_BYTES:,} are allowed.")
        index = parse_json(file.read(size), path, depth=8)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise InvalidFile(f"{path}: it has no weight_map, so it is not an index of safetensors files.")
    for name, file in weight_map.items():
        if reason := name_error(name):
            raise InvalidFile(f"{path}: {name[:100]!r} is not a valid array name: {reason}.")
        if not _is_file_name(file) or not file.endswith(".safetensors"):
            raise InvalidFile(f"{path}: {name!r} is in {str(file)[:100]!r}, but must be in a file beside the index.")
    return weight_map


def _is_file_name(name: object) -> bool:
    """Whether this is the name of a file in the same folder, and not a path elsewhere."""
    return isinstance(name, str) and os.path.basename(name) == name and "\\" not in name and not name_error(name)
