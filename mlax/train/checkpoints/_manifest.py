"""The manifest of a step: every array, where its pieces lie, and what they hash to.

A JSON file whose first entry is the xxh3-128 of all bytes after that entry. It is written last: a folder without
one, or with one that does not hash to what it says, is no checkpoint.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import xxhash

from mlax.files import Refused, is_count, parsed, why_not
from mlax.train.checkpoints._dtypes import BY_NAME
from mlax.train.checkpoints._tiling import tiles

VERSION = 1
MOST_BYTES = 1 << 27
_FRONT = b'{"xxh3_128": "'
_HASH = re.compile(r"[0-9a-f]{32}")
FILE = re.compile(r"(?:arrays-\d{5}-of-\d{5}|process-\d{5}-\d{5})\.safetensors")


class FileRecord(NamedTuple):
    """A file of the step: its bytes, and the xxh3-128 of its header and of all of it."""

    size: int
    header: str
    xxh3_128: str


class PieceRecord(NamedTuple):
    """A block of an array: in which file, by which name, where in the array, and the xxh3-128 of its bytes."""

    file: str
    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    xxh3_128: str


class ArrayRecord(NamedTuple):
    """One array; `key` names the algorithm if it holds typed keys."""

    shape: tuple[int, ...]
    dtype: str
    key: str | None
    pieces: tuple[PieceRecord, ...]


class Manifest(NamedTuple):
    """What a step consists of."""

    step: int
    save: str  # the name of the save among all that there ever were
    metrics: Mapping[str, float]
    notes: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    arrays: Mapping[str, ArrayRecord]


def digest(data: bytes | memoryview) -> str:
    """The xxh3-128 of some bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def encoded(manifest: Manifest) -> bytes:
    """The manifest as a file; one array a line."""
    files = {name: record._asdict() for name, record in manifest.files.items()}
    arrays = {
        name: {**record._asdict(), "pieces": [piece._asdict() for piece in record.pieces]}
        for name, record in manifest.arrays.items()
    }
    metrics = {name: _written(value) for name, value in manifest.metrics.items()}
    words = {"format": "mlax checkpoint", "version": VERSION, "step": manifest.step, "save": manifest.save}
    rest = f'",\n{json.dumps({**words, "metrics": metrics, "notes": manifest.notes})[1:-1]},\n'
    rest += f'"files": {_lines(files)},\n"arrays": {_lines(arrays)}}}\n'
    return _FRONT + digest(rest.encode()).encode() + rest.encode()


def decoded(data: bytes, path: str, *, whole: bool = True) -> Manifest:
    """The manifest in a file, every field of it checked. If it is `whole`, the pieces are the arrays, exactly."""
    hashed, rest = data[len(_FRONT) : len(_FRONT) + 32], data[len(_FRONT) + 32 :]
    if not data.startswith(_FRONT) or digest(rest).encode() != hashed:
        raise Refused(f"{path}: its hash does not match what it says; it is damaged.")
    words = parsed(data, path, depth=32)
    if words.get("format") != "mlax checkpoint" or words.get("version") != VERSION:
        raise Refused(f"{path}: version {words.get('version')!r} is not known; this mlax reads {VERSION}.")
    try:
        files = {name: FileRecord(**record) for name, record in words["files"].items()}
        arrays = {name: _array(record) for name, record in words["arrays"].items()}
        metrics = {name: float(value) for name, value in words["metrics"].items()}
        manifest = Manifest(words["step"], words["save"], metrics, words["notes"], files, arrays)
    except (KeyError, TypeError, ValueError, AttributeError) as failure:
        raise Refused(f"{path}: it is not laid out as a manifest ({failure!r}).") from None
    for fault in _faults(manifest, whole):
        raise Refused(f"{path}: {fault}.")
    return manifest


def _lines(records: dict[str, Any]) -> str:
    return "{" + ",".join(f"\n{json.dumps(name)}: {json.dumps(record)}" for name, record in records.items()) + "}"


def _written(value: float) -> float | str:
    return value if abs(value) < float("inf") else str(value)  # JSON has no nan and no inf


def _array(words: dict[str, Any]) -> ArrayRecord:
    pieces = [
        PieceRecord(**{**piece, "start": tuple(piece["start"]), "shape": tuple(piece["shape"])})
        for piece in words["pieces"]
    ]
    return ArrayRecord(**{**words, "shape": tuple(words["shape"]), "pieces": tuple(pieces)})


def _faults(manifest: Manifest, whole: bool) -> Iterable[str]:
    if not is_count(manifest.step) or not isinstance(manifest.save, str) or not isinstance(manifest.notes, dict):
        yield "its step, save or notes are none"
    for name, record in manifest.files.items():
        if not FILE.fullmatch(name) or not is_count(record.size) or not _hashes(record.header, record.xxh3_128):
            yield f"{name[:100]!r} is no file of a checkpoint"
    for name, array in manifest.arrays.items():
        if (why := why_not(name)) or array.dtype not in BY_NAME or not isinstance(array.key, str | None):
            yield f"the array {name[:100]!r} is described wrongly ({why or array.dtype})"
        for piece in array.pieces:
            numbers = (*array.shape, *piece.start, *piece.shape)
            if piece.file not in manifest.files or not isinstance(piece.name, str) or not _hashes(piece.xxh3_128):
                yield f"a piece of {name!r} lies nowhere"
            if not all(is_count(number) for number in numbers):
                yield f"a piece of {name!r} has no shape"
        if whole and not tiles(array.shape, [(piece.start, piece.shape) for piece in array.pieces]):
            yield f"the pieces of {name!r} are not the whole of it"


def _hashes(*words: Any) -> bool:
    return all(isinstance(word, str) and _HASH.fullmatch(word) for word in words)
