"""load: read a pytree of arrays from a safetensors file, or from the files of an index."""

import errno
import mmap
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from mlax.core import unflatten_paths
from mlax.files._io import InvalidFile, parse_json, safe_open
from mlax.files._safetensors import (
    MAX_ARRAYS,
    MAX_HEADER_BYTES,
    MAX_METADATA,
    Entry,
    Header,
    check_total_parts,
    name_error,
    read_header,
)

MAX_INDEX_HEADER_BYTES = 4 * MAX_HEADER_BYTES  # of all files of an index together
_SCAN_BYTES = 1 << 24  # per call


def load(path: str | os.PathLike[str], *, within: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Load the nested dicts of NumPy arrays in a safetensors file, memory-mapped and read-only.

    The file may be untrusted: its header and its booleans are validated, the rest of the data is not read, and an
    invalid file raises `InvalidFile`. Arrays are never copied, so those of a file that does not align them are not
    aligned, which NumPy and JAX accept. A path that ends in
    `.json` is an index (`model.safetensors.index.json`), whose files are read from its own folder. Symbolic links may
    only lead to files inside the file's folder, or inside `within`, such as a download cache.
    """
    path, within = os.fspath(path), os.fspath(within) if within is not None else None
    arrays = _load_index(path, within) if path.endswith(".json") else _load_file(path, within)[1]
    try:
        return unflatten_paths(arrays.items()) or {}
    except ValueError as error:
        raise InvalidFile(f"{path}: {error}") from None


def metadata(path: str | os.PathLike[str], *, within: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """The metadata of a safetensors file: a dict of strings."""
    path = os.fspath(path)
    with safe_open(path, os.fspath(within) if within is not None else None) as (file, size):
        return read_header(file, size, path).metadata


def _load_file(path: str, within: str | None) -> tuple[Header, dict[str, np.ndarray]]:
    with safe_open(path, within) as (file, size):
        header = read_header(file, size, path)
        data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        for name, entry in header.entries.items():
            if entry.dtype == np.bool_:
                check_booleans(file, data, entry, f"{path}, array {name!r}")
    return header, {name: _view_array(data, entry) for name, entry in header.entries.items()}


def _view_array(data: mmap.mmap, entry: Entry) -> np.ndarray:
    if entry.start == entry.stop:
        return np.empty(entry.shape, entry.dtype)
    array = np.frombuffer(data, np.uint8, entry.stop - entry.start, entry.start)
    return array.view(entry.dtype).reshape(entry.shape)


def release_pages(array: Any) -> None:
    """Drop the pages of a memory-mapped array from this process's memory; they are read again when they are needed."""
    base: Any = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if isinstance(base, mmap.mmap) and hasattr(base, "madvise") and array.size:
        start, (low, high) = np.frombuffer(base, np.uint8).ctypes.data, np.lib.array_utils.byte_bounds(array)
        offset = (low - start) // mmap.PAGESIZE * mmap.PAGESIZE
        base.madvise(mmap.MADV_DONTNEED, offset, high - start - offset)


def check_booleans(file: BinaryIO, data: mmap.mmap, entry: Entry, where: str) -> None:
    for start, stop in _data_extents(file.fileno(), entry.start, entry.stop):
        for at in range(start, stop, _SCAN_BYTES):
            largest = np.frombuffer(data, np.uint8, min(_SCAN_BYTES, stop - at), at).max()
            if largest > 1:
                raise InvalidFile(f"{where}: it is boolean but contains {largest}; only 0 and 1 are valid.")


def _data_extents(descriptor: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The parts of a file that are stored; a sparse one has holes, which read as zeros and cost nothing to make."""
    while start < stop:
        try:
            start = os.lseek(descriptor, start, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
        except (AttributeError, OSError) as error:
            if getattr(error, "errno", None) != errno.ENXIO:  # which means that there are no more data
                yield start, stop  # holes cannot be found here
            return
        if start < stop:
            yield start, min(end, stop)
        start = end


def _load_index(path: str, within: str | None) -> dict[str, np.ndarray]:
    weight_map = read_index(path, within, ".safetensors")
    folder = os.path.dirname(os.path.abspath(path))
    files: dict[str, dict[str, np.ndarray]] = {}
    header_bytes = 0
    for file in sorted(set(weight_map.values())):
        header, files[file] = _load_file(os.path.join(folder, file), within)
        header_bytes += len(header.raw)
        if header_bytes > MAX_INDEX_HEADER_BYTES:
            raise InvalidFile(f"{path}: the headers of its files have more than {MAX_INDEX_HEADER_BYTES:,} bytes.")
    for name, file in weight_map.items():
        if name not in files[file]:
            raise InvalidFile(f"{path}: it lists {name!r} in {file}, which does not contain it.")
    return {name: files[file][name] for name, file in weight_map.items()}


def read_index(path: str, within: str | None, suffix: str) -> dict[str, str]:
    """The file of each array: plain names, which end in `suffix`, of files beside the index."""
    with safe_open(path, within) as (file, size):
        if size > MAX_HEADER_BYTES:
            raise InvalidFile(f"{path}: the index has {size:,} bytes, and at most {MAX_HEADER_BYTES:,} are allowed.")
        index = parse_json(file.read(size), path, depth=8, items=MAX_ARRAYS + MAX_METADATA)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise InvalidFile(f"{path}: it has no weight_map, so it is not an index of {suffix} files.")
    for name, file in weight_map.items():
        if reason := name_error(name):
            raise InvalidFile(f"{path}: {name[:100]!r} is not a valid array name: {reason}.")
        if not _is_file_name(file) or not file.endswith(suffix):
            raise InvalidFile(f"{path}: {name!r} is in {str(file)[:100]!r}, but must be in a file beside the index.")
    check_total_parts(weight_map, path)
    folder = os.path.dirname(os.path.abspath(path))
    for file in sorted(set(weight_map.values())):
        if not os.path.lexists(os.path.join(folder, file)):
            raise FileNotFoundError(f"{path}: it lists {file}, which is not beside it; download all its files.")
    return weight_map


def _is_file_name(name: object) -> bool:
    """Whether this is the name of a file in the same folder, and not a path elsewhere."""
    return isinstance(name, str) and os.path.basename(name) == name and "\\" not in name and not name_error(name)
