"""The safetensors format: dtypes, names, and a header that is validated in full before use.

https://github.com/huggingface/safetensors#format. Stricter than its reference: duplicate keys, names that are not plain
paths, more entries or bytes than any real file has, and gaps between arrays are refused.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from mlax.files._io import InvalidFile, is_count, parse_json

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("<u1"),
    "I8": np.dtype("<i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
DTYPE_NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


class SerializedFile(NamedTuple):
    """A file that could be written: the header, then the arrays in the order of their bytes."""

    header: bytes
    arrays: dict[str, memoryview]

    @property
    def size(self) -> int:
        """How many bytes that is."""
        return len(self.header) + sum(view.nbytes for view in self.arrays.values())


def serialize(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> SerializedFile:
    """The file of these arrays. Wide items come first, so that each array is aligned."""
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header = encode_header(((name, arrays[name].dtype, arrays[name].shape) for name in order), metadata)
    return SerializedFile(header, {name: byte_view(arrays[name]) for name in order})


def to_file_layout(array: np.ndarray) -> np.ndarray:
    """The array as C lays it out, little end first: itself, if it is so already."""
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array if array.flags.c_contiguous else array.copy(order="C")


def byte_view(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, whatever its dtype."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def is_storable(dtype: np.dtype) -> bool:
    """Whether safetensors has this dtype."""
    return dtype in DTYPE_NAMES


MAX_HEADER_BYTES, MAX_ARRAYS, MAX_AXES = 1 << 25, 100_000, 32


class Entry(NamedTuple):
    """One array of a file: bytes `start` to `stop` of it."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """What a file holds."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    raw: bytes  # as it stands in the file, the length in front of it included


def encode_header(arrays: Iterable[tuple[str, np.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The header of a file of these arrays, one after the other, padded so that the first of them is aligned."""
    words: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape in arrays:
        size = math.prod(shape) * dtype.itemsize
        words[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(words, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: BinaryIO, size: int, path: str) -> Header:
    """The header of an open file of `size` bytes, checked; `path` is for the words."""
    front = file.read(8)
    length = int.from_bytes(front, "little")
    if len(front) < 8 or length > size - 8:
        raise InvalidFile(f"{path}: {size:,} bytes are no whole safetensors file; it was cut, or is something else.")
    if length > MAX_HEADER_BYTES:
        raise InvalidFile(f"{path}: its header is said to have {length:,} bytes, and {MAX_HEADER_BYTES:,} are allowed.")
    text = file.read(length)
    if len(text) < length:
        raise InvalidFile(f"{path}: it ended while its header was read.")
    words = parse_json(text, path, depth=3)
    metadata = words.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidFile(f"{path}: its metadata are not strings by name.")
    if len(words) > MAX_ARRAYS:
        raise InvalidFile(f"{path}: it has {len(words):,} arrays, and {MAX_ARRAYS:,} are allowed.")
    entries = {name: _parse_entry(name, entry, 8 + length, path) for name, entry in words.items()}
    _check_offsets(entries, 8 + length, size, path)
    return Header(entries, metadata, front + text)


def _parse_entry(name: str, entry: Any, offset: int, path: str) -> Entry:
    where = f"{path}, array {name[:100]!r}"
    if why := name_error(name):
        raise InvalidFile(f"{where}: that is no name for an array; {why}.")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise InvalidFile(f"{where}: it is not described by dtype, shape and data_offsets.")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise InvalidFile(f"{where}: its dtype is {str(entry['dtype'])[:40]!r}; known are {', '.join(DTYPES)}.")
    shape, span = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MAX_AXES or not all(is_count(length) for length in shape):
        raise InvalidFile(f"{where}: its shape is not a list of at most {MAX_AXES} lengths.")
    if not isinstance(span, list) or len(span) != 2 or not all(is_count(end) for end in span) or span[0] > span[1]:
        raise InvalidFile(f"{where}: its data_offsets are {str(span)[:80]}, not a beginning and an end.")
    if math.prod(max(1, length) for length in shape) * dtype.itemsize > 2**63 - 1:  # Python's integers have no bound
        raise InvalidFile(f"{where}: no memory has room for {dtype}{shape}.")
    wanted = math.prod(shape) * dtype.itemsize
    if wanted != span[1] - span[0]:
        raise InvalidFile(f"{where}: {dtype}{shape} takes {wanted:,} bytes, but it is given {span[1] - span[0]:,}.")
    return Entry(dtype, tuple(shape), offset + span[0], offset + span[1])


def _check_offsets(entries: dict[str, Entry], offset: int, size: int, path: str) -> None:
    at = offset
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.stop > size:
            raise InvalidFile(
                f"{path}, array {name!r}: it ends at byte {entry.stop:,} of {size:,}; the file is truncated."
            )
        if entry.start != at:
            fault = "lies over the one before it" if entry.start < at else "leaves a hole before it"
            raise InvalidFile(f"{path}, array {name!r}: it {fault}, at byte {min(at, entry.start):,}.")
        at = entry.stop
    if at != size:
        raise InvalidFile(f"{path}: its arrays end at byte {at:,}, but the file has {size:,}.")


MAX_NAME_LENGTH = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def name_error(name: str) -> str | None:
    """Why this is no name for an array, or None if it is one: names, joined by slashes, that are no way up."""
    if not name or len(name) > MAX_NAME_LENGTH:
        return f"it has {len(name):,} characters, and 1 to {MAX_NAME_LENGTH:,} are allowed"
    if name == "__metadata__":
        return "the format has it for the words beside the arrays"
    if _CONTROL.search(name):
        return "it has a control character in it"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "it is not a plain path: '', '.' and '..' are no names"
    return None
