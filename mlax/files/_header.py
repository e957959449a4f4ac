"""The header of a safetensors file: what it holds and where, believed only after every number has been checked.

https://github.com/huggingface/safetensors#format. Stricter than its reference: duplicate keys, names that lead
elsewhere, more entries or bytes than any real file has, and holes between arrays are refused.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mlax.files._dtypes import BY_NAME, NAMES
from mlax.files._json import is_count, parsed
from mlax.files._name import why_not
from mlax.files._refused import Refused

MOST_BYTES, MOST_ENTRIES, MOST_AXES = 1 << 25, 100_000, 32


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


def encoded(arrays: Iterable[tuple[str, np.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The header of a file of these arrays, one after the other, padded so that the first of them is aligned."""
    words: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape in arrays:
        size = math.prod(shape) * dtype.itemsize
        words[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(words, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: BinaryIO, size: int, path: str) -> Header:
    """The header of an open file of `size` bytes, checked; `path` is for the words."""
    front = file.read(8)
    length = int.from_bytes(front, "little")
    if len(front) < 8 or length > size - 8:
        raise Refused(f"{path}: {size:,} bytes are no whole safetensors file; it was cut, or is something else.")
    if length > MOST_BYTES:
        raise Refused(f"{path}: its header is said to have {length:,} bytes, and {MOST_BYTES:,} are allowed.")
    text = file.read(length)
    if len(text) < length:
        raise Refused(f"{path}: it ended while its header was read.")
    words = parsed(text, path, depth=3)
    metadata = words.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Refused(f"{path}: its metadata are not strings by name.")
    if len(words) > MOST_ENTRIES:
        raise Refused(f"{path}: it has {len(words):,} arrays, and {MOST_ENTRIES:,} are allowed.")
    entries = {name: _entry(name, entry, 8 + length, path) for name, entry in words.items()}
    _check_places(entries, 8 + length, size, path)
    return Header(entries, metadata, front + text)


def _entry(name: str, entry: Any, offset: int, path: str) -> Entry:
    where = f"{path}, array {name[:100]!r}"
    if why := why_not(name):
        raise Refused(f"{where}: that is no name for an array; {why}.")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise Refused(f"{where}: it is not described by dtype, shape and data_offsets.")
    dtype = BY_NAME.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise Refused(f"{where}: its dtype is {str(entry['dtype'])[:40]!r}; known are {', '.join(BY_NAME)}.")
    shape, span = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MOST_AXES or not all(is_count(length) for length in shape):
        raise Refused(f"{where}: its shape is not a list of at most {MOST_AXES} lengths.")
    if not isinstance(span, list) or len(span) != 2 or not all(is_count(end) for end in span) or span[0] > span[1]:
        raise Refused(f"{where}: its data_offsets are {str(span)[:80]}, not a beginning and an end.")
    if math.prod(max(1, length) for length in shape) * dtype.itemsize > 2**63 - 1:  # Python's integers have no bound
        raise Refused(f"{where}: no memory has room for {dtype}{shape}.")
    wanted = math.prod(shape) * dtype.itemsize
    if wanted != span[1] - span[0]:
        raise Refused(f"{where}: {dtype}{shape} takes {wanted:,} bytes, but it is given {span[1] - span[0]:,}.")
    return Entry(dtype, tuple(shape), offset + span[0], offset + span[1])


def _check_places(entries: dict[str, Entry], offset: int, size: int, path: str) -> None:
    at = offset
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.stop > size:
            raise Refused(f"{path}, array {name!r}: it ends at byte {entry.stop:,} of a file of {size:,}; it was cut.")
        if entry.start != at:
            fault = "lies over the one before it" if entry.start < at else "leaves a hole before it"
            raise Refused(f"{path}, array {name!r}: it {fault}, at byte {min(at, entry.start):,}.")
        at = entry.stop
    if at != size:
        raise Refused(f"{path}: its arrays end at byte {at:,}, but the file has {size:,}.")
