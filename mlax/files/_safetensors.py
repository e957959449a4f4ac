"""The safetensors format: dtypes, array names, and headers that are validated in full before use.

https://github.com/huggingface/safetensors#format. Stricter than the reference implementation: duplicate keys, names
that are not plain paths, more entries or bytes than any real file has, and gaps between arrays are errors.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from mlax.files._io import InvalidFile, is_count, parse_json

MAX_HEADER_BYTES, MAX_ARRAYS, MAX_AXES, MAX_NAME_LENGTH = 1 << 25, 100_000, 32, 1024
MAX_METADATA, MAX_NAME_PARTS, MAX_TOTAL_PARTS = 10_000, 64, 10 * MAX_ARRAYS
MAX_HEADER_ITEMS = 12 * MAX_ARRAYS  # values in the JSON: four, and one for each axis, of an array

SAFETENSORS_DTYPES: dict[str, np.dtype] = {
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
SAFETENSORS_DTYPE_NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class SerializedFile(NamedTuple):
    """The contents of a file that is not written yet: the header, then the bytes of each array in file order."""

    header: bytes
    arrays: dict[str, memoryview]

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return len(self.header) + sum(view.nbytes for view in self.arrays.values())


class Entry(NamedTuple):
    """One array: bytes `start` to `stop` of its file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """The arrays and the metadata of a file."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    raw: bytes  # including the eight bytes of its length


def serialize(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> SerializedFile:
    """Serialize arrays in `to_file_layout` without copying them; the widest dtypes first, so that each is aligned."""
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header = encode_header(((name, arrays[name].dtype, arrays[name].shape) for name in order), metadata)
    return SerializedFile(header, {name: byte_view(arrays[name]) for name in order})


def to_file_layout(array: np.ndarray) -> np.ndarray:
    """The array as little-endian and C-contiguous; copied only if it is not."""
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array if array.flags.c_contiguous else array.copy(order="C")


def byte_view(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array of any dtype."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def is_storable(dtype: np.dtype) -> bool:
    """Whether safetensors has this dtype."""
    return dtype in SAFETENSORS_DTYPE_NAMES


def name_error(name: str) -> str | None:
    """Why `name` is not a valid array name, or None if it is: parts joined by slashes, none of them `..`."""
    if not name or len(name) > MAX_NAME_LENGTH:
        return f"it has {len(name):,} characters, and 1 to {MAX_NAME_LENGTH:,} are allowed"
    if name == "__metadata__":
        return "the format reserves it for metadata"
    if _CONTROL.search(name):
        return "it contains a control character"
    parts = name.split("/")
    if len(parts) > MAX_NAME_PARTS:
        return f"it has {len(parts)} parts, and at most {MAX_NAME_PARTS} are allowed"
    if any(part in ("", ".", "..") for part in parts):
        return "it is not a plain path: '', '.' and '..' are not allowed as parts"
    return None


def check_total_parts(names: Iterable[str], path: str) -> None:
    """Raise InvalidFile if the nested dicts of these names would have too many nodes. `path` is for errors."""
    if (parts := sum(name.count("/") + 1 for name in names)) > MAX_TOTAL_PARTS:
        raise InvalidFile(f"{path}: its names have {parts:,} parts, and at most {MAX_TOTAL_PARTS:,} are allowed.")


def encode_header(arrays: Iterable[tuple[str, np.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The header of a file with these arrays in this order, padded so that the first one is aligned."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, dtype, shape in arrays:
        stop = start + math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": SAFETENSORS_DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: BinaryIO, size: int, path: str) -> Header:
    """Read and validate the header of an open file of `size` bytes. `path` is for errors."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > size - 8:
        raise InvalidFile(f"{path}: its {size:,} bytes are not a safetensors file; it is truncated or another format.")
    if length > MAX_HEADER_BYTES:
        raise InvalidFile(f"{path}: its header claims {length:,} bytes, and at most {MAX_HEADER_BYTES:,} are allowed.")
    text = file.read(length)
    if len(text) < length:
        raise InvalidFile(f"{path}: the file ended inside its header.")
    fields = parse_json(text, path, depth=3, items=MAX_HEADER_ITEMS)
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidFile(f"{path}: its metadata is not a dict of strings.")
    if len(metadata) > MAX_METADATA:
        raise InvalidFile(f"{path}: it has {len(metadata):,} metadata, and at most {MAX_METADATA:,} are allowed.")
    if len(fields) > MAX_ARRAYS:
        raise InvalidFile(f"{path}: it has {len(fields):,} arrays, and at most {MAX_ARRAYS:,} are allowed.")
    check_total_parts(fields, path)
    entries = {name: _parse_entry(name, entry, 8 + length, path) for name, entry in fields.items()}
    _check_offsets(entries, 8 + length, size, path)
    return Header(entries, metadata, prefix + text)


def _parse_entry(name: str, entry: Any, offset: int, path: str) -> Entry:
    where = f"{path}, array {name[:100]!r}"
    if reason := name_error(name):
        raise InvalidFile(f"{where}: invalid name: {reason}.")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise InvalidFile(f"{where}: its fields are not dtype, shape and data_offsets.")
    dtype = SAFETENSORS_DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise InvalidFile(
            f"{where}: its dtype is {str(entry['dtype'])[:40]!r}, which is not one of {', '.join(SAFETENSORS_DTYPES)}."
        )
    shape, span = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MAX_AXES or not all(is_count(length) for length in shape):
        raise InvalidFile(f"{where}: its shape is not a list of at most {MAX_AXES} lengths.")
    if not isinstance(span, list) or len(span) != 2 or not all(is_count(end) for end in span) or span[0] > span[1]:
        raise InvalidFile(f"{where}: its data_offsets are {str(span)[:80]}, not a start and a stop.")
    if math.prod(max(1, length) for length in shape) * dtype.itemsize > 2**63 - 1:  # Python integers do not overflow
        raise InvalidFile(f"{where}: {dtype}{shape} is larger than any memory.")
    size = math.prod(shape) * dtype.itemsize
    if size != span[1] - span[0]:
        raise InvalidFile(
            f"{where}: {dtype}{shape} takes {size:,} bytes, but its data_offsets span {span[1] - span[0]:,}."
        )
    return Entry(dtype, tuple(shape), offset + span[0], offset + span[1])


def _check_offsets(entries: dict[str, Entry], offset: int, size: int, path: str) -> None:
    """Check that the arrays fill the file after its header, without gaps or overlaps."""
    end = offset
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.stop > size:
            raise InvalidFile(
                f"{path}, array {name!r}: it ends at byte {entry.stop:,} of {size:,}; the file is truncated."
            )
        if entry.start != end:
            fault = "it overlaps the array before it" if entry.start < end else "there is a gap before it"
            raise InvalidFile(f"{path}, array {name!r}: {fault}, at byte {min(end, entry.start):,}.")
        end = entry.stop
    if end != size:
        raise InvalidFile(f"{path}: its arrays end at byte {end:,}, but the file has {size:,}.")
