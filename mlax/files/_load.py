"""load: read a pytree of arrays from a safetensors file, or from the files of an index."""

import mmap
import os
from typing import Any

import numpy as np

from mlax.core import unflatten_paths
from mlax.files._io import InvalidFile, parse_json, safe_open
from mlax.files._safetensors import MAX_HEADER_BYTES, Entry, name_error, read_header


def load(path: str | os.PathLike[str], *, within: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The nested dicts of NumPy arrays in a safetensors file, read-only and mapped into memory where they lie.

    The file may come from a stranger: what is not exactly right is refused, in words. A path that ends in `.json` is
    an index (`model.safetensors.index.json`): the files that it names are read from its own folder. Links are
    followed to places in the file's folder only, or in `within`: a cache of downloads, say.
    """
    path, within = os.fspath(path), os.fspath(within) if within is not None else None
    arrays = _load_index(path, within) if path.endswith(".json") else _load_file(path, within)
    try:
        return unflatten_paths(arrays.items()) or {}
    except ValueError as failure:
        raise InvalidFile(f"{path}: {failure}") from None


def metadata(path: str | os.PathLike[str], *, within: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """The words that a safetensors file carries beside its arrays."""
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
        raise InvalidFile(f"{path}, array {name!r}: {array.max()} is no boolean; they are 0 or 1.")
    return np.require(array.view(entry.dtype).reshape(entry.shape), requirements="A")  # a copy if it is not aligned


def _load_index(path: str, within: str | None) -> dict[str, np.ndarray]:
    places = read_index(path, within)
    folder = os.path.dirname(os.path.abspath(path))
    files = {file: _load_file(os.path.join(folder, file), within) for file in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in files[file]:
            raise InvalidFile(f"{path}: it says that {name!r} is in {file}, but it is not.")
    return {name: files[file][name] for name, file in places.items()}


def read_index(path: str, within: str | None) -> dict[str, str]:
    """The file of each array, a plain name in the folder of the index."""
    with safe_open(path, within) as (file, size):
        if size > MAX_HEADER_BYTES:
            raise InvalidFile(f"{path}: an index of {size:,} bytes is refused; {MAX_HEADER_BYTES:,} are allowed.")
        words = parse_json(file.read(size), path, depth=8)
    places = words.get("weight_map")
    if not isinstance(places, dict):
        raise InvalidFile(f"{path}: it has no weight_map, so it is no index of safetensors files.")
    for name, place in places.items():
        if why := name_error(name):
            raise InvalidFile(f"{path}: {name[:100]!r} is no name for an array; {why}.")
        if not _is_file_name(place) or not place.endswith(".safetensors"):
            raise InvalidFile(f"{path}: {name!r} is in {str(place)[:100]!r}, but must be in a file beside the index.")
    return places


def _is_file_name(place: object) -> bool:
    """Whether this is the name of a file in the same folder, and no way to another."""
    return isinstance(place, str) and os.path.basename(place) == place and "\\" not in place and not name_error(place)
