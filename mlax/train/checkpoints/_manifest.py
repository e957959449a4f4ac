"""The manifest of a step: its arrays, the files and blocks that hold them, and their hashes.

A JSON file whose first entry is the xxh3-128 hash of all bytes after that entry. It is written last: a folder without
a manifest, or with one whose hash does not match, is not a checkpoint.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import xxhash

from mlax._jax import leaves_with_paths
from mlax.files import MAX_AXES, SAFETENSORS_DTYPES, InvalidFile, is_count, name_error, parse_json, safe_open
from mlax.train.checkpoints._blocks import is_partition

VERSION = 1  # what is written; it and all before it are read
MAX_MANIFEST_BYTES, MAX_MANIFEST_ITEMS, MAX_MANIFEST_DEPTH = 1 << 27, 1 << 23, 32
_PREFIX = b'{"xxh3_128": "'
_HASH = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(r"(?:arrays-\d{5}-of-\d{5}|process-\d{5}-\d{5})\.safetensors")

_OTHER_DTYPES = (
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float4_e2m1fn",
    "int2",
    "int4",
    "uint2",
    "uint4",
)
CHECKPOINT_DTYPES: dict[str, np.dtype] = {
    dtype.name: dtype for dtype in SAFETENSORS_DTYPES.values()
}  # all that JAX has
CHECKPOINT_DTYPES |= {name: np.dtype(getattr(ml_dtypes, name)) for name in _OTHER_DTYPES}
CHECKPOINT_DTYPES["complex128"] = np.dtype(np.complex128)
CHECKPOINT_DTYPE_NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in CHECKPOINT_DTYPES.items()}


class FileRecord(NamedTuple):
    """A file of the step: its size in bytes, and the xxh3-128 of its header and of the whole file."""

    size: int
    header: str
    xxh3_128: str


class PieceRecord(NamedTuple):
    """A stored block of an array: its file, its name there, its position in the array and the xxh3-128 of its bytes."""

    file: str
    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    xxh3_128: str


class ArrayRecord(NamedTuple):
    """One array; `key` is the algorithm if it holds typed keys."""

    shape: tuple[int, ...]
    dtype: str
    key: str | None
    pieces: tuple[PieceRecord, ...]


class Manifest(NamedTuple):
    """The contents of a step."""

    step: int
    save: str  # the unique id of the save
    metrics: Mapping[str, float]
    notes: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    arrays: Mapping[str, ArrayRecord]


def hash_bytes(data: bytes | memoryview) -> str:
    """The xxh3-128 of some bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON, one array a line."""
    files = {name: record._asdict() for name, record in manifest.files.items()}
    arrays = {
        name: {**record._asdict(), "pieces": [piece._asdict() for piece in record.pieces]}
        for name, record in manifest.arrays.items()
    }
    metrics = {name: _json_float(value) for name, value in manifest.metrics.items()}
    fields = {"format": "mlax checkpoint", "version": VERSION, "step": manifest.step, "save": manifest.save}
    rest = f'",\n{json.dumps({**fields, "metrics": metrics, "notes": manifest.notes})[1:-1]},\n'
    rest += f'"files": {_json_lines(files)},\n"arrays": {_json_lines(arrays)}}}\n'
    return _PREFIX + hash_bytes(rest.encode()).encode() + rest.encode()


def _json_lines(records: dict[str, Any]) -> str:
    return "{" + ",".join(f"\n{json.dumps(name)}: {json.dumps(record)}" for name, record in records.items()) + "}"


def _json_float(value: float) -> float | str:
    return value if abs(value) < float("inf") else str(value)  # JSON has neither nan nor inf


def read_manifest(path: str, *, partial: bool = False) -> Manifest:
    """Read and validate a manifest. A `partial` one, of one of several processes, need not have all of each array."""
    try:
        with safe_open(path) as (file, size):
            return decode_manifest(file.read(min(size, MAX_MANIFEST_BYTES + 1)), path, partial=partial)
    except OSError as error:
        raise InvalidFile(f"{path}: it cannot be read ({error.strerror}).") from None


def decode_manifest(data: bytes, path: str, *, partial: bool = False) -> Manifest:
    """Validate the bytes of a manifest. `path` is for errors."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise InvalidFile(f"{path}: it is larger than {MAX_MANIFEST_BYTES:,} bytes, which is the most allowed.")
    expected, rest = data[len(_PREFIX) : len(_PREFIX) + 32], data[len(_PREFIX) + 32 :]
    if not data.startswith(_PREFIX) or hash_bytes(rest).encode() != expected:
        raise InvalidFile(f"{path}: its hash does not match its contents; it is damaged.")
    fields = parse_json(data, path, depth=MAX_MANIFEST_DEPTH, items=MAX_MANIFEST_ITEMS)
    version = fields.get("version", 0)
    if fields.get("format") != "mlax checkpoint" or not is_count(version) or version == 0:
        raise InvalidFile(f"{path}: it is not a manifest of a checkpoint.")
    if version > VERSION:
        raise InvalidFile(f"{path}: its version is {version}, but this mlax reads up to {VERSION}; upgrade mlax.")
    try:
        files = {name: FileRecord(**record) for name, record in fields["files"].items()}
        arrays = {name: _decode_array(record) for name, record in fields["arrays"].items()}
        metrics = {name: float(value) for name, value in fields["metrics"].items()}
        manifest = Manifest(fields["step"], fields["save"], metrics, fields["notes"], files, arrays)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidFile(f"{path}: it does not have the fields of a manifest ({error!r}).") from None
    for fault in _manifest_faults(manifest, partial):
        raise InvalidFile(f"{path}: {fault}.")
    return manifest


def _decode_array(fields: dict[str, Any]) -> ArrayRecord:
    pieces = [
        PieceRecord(**{**piece, "start": tuple(piece["start"]), "shape": tuple(piece["shape"])})
        for piece in fields["pieces"]
    ]
    return ArrayRecord(**{**fields, "shape": tuple(fields["shape"]), "pieces": tuple(pieces)})


def _manifest_faults(manifest: Manifest, partial: bool) -> Iterator[str]:
    if not is_count(manifest.step) or not isinstance(manifest.save, str) or not isinstance(manifest.notes, dict):
        yield "its step, save or notes are invalid"
    for name, record in manifest.files.items():
        hashes = (record.header, record.xxh3_128)
        if not _FILE_NAME.fullmatch(name) or not is_count(record.size) or not _are_hashes(*hashes):
            yield f"the file {name[:100]!r} is described wrongly"
    pieces = [(piece.file, piece.name) for array in manifest.arrays.values() for piece in array.pieces]
    if len(set(pieces)) < len(pieces):
        label = next(piece for piece, count in Counter(pieces).items() if count > 1)
        yield f"two pieces are stored as {str(label[1])[:100]!r} in {label[0]}, so one has overwritten the other"
    for name, array in manifest.arrays.items():
        if len(array.shape) > MAX_AXES:
            yield f"the array {name[:100]!r} has {len(array.shape)} axes, and at most {MAX_AXES} are allowed"
        if (
            (reason := name_error(name))
            or array.dtype not in CHECKPOINT_DTYPES
            or not isinstance(array.key, str | None)
        ):
            yield f"the array {name[:100]!r} is described wrongly ({reason or array.dtype})"
        for piece in array.pieces:
            if piece.file not in manifest.files or not isinstance(piece.name, str) or not _are_hashes(piece.xxh3_128):
                yield f"a piece of {name!r} has no valid file, name or hash"
            if not all(is_count(length) for length in (*array.shape, *piece.start, *piece.shape)):
                yield f"a piece of {name!r} has no valid start or shape"
        if not partial and not is_partition(array.shape, [(piece.start, piece.shape) for piece in array.pieces]):
            yield f"the pieces of {name!r} do not cover it exactly once"


def _are_hashes(*values: Any) -> bool:
    return all(isinstance(value, str) and _HASH.fullmatch(value) for value in values)


def merge_manifests(parts: Sequence[Manifest]) -> tuple[dict[str, str], Manifest]:
    """Merge the manifests of all processes: the new name of each file, and the manifest of the whole step."""
    files = {name: record for part in parts for name, record in part.files.items()}
    order = sorted(files)
    names = {old: f"arrays-{number:05d}-of-{len(order):05d}.safetensors" for number, old in enumerate(order, 1)}
    arrays: dict[str, ArrayRecord] = {}
    for index, part in enumerate(parts):
        if part.save != parts[0].save or part.arrays.keys() != parts[0].arrays.keys():
            raise InvalidFile(f"Process {index} saves other arrays than process 0; save the same tree in each.")
        for name, record in part.arrays.items():
            merged = arrays.get(name, record._replace(pieces=()))
            if merged[:3] != record[:3]:
                raise InvalidFile(f"{name!r} is {record[:2]} in process {index} but {merged[:2]} in another.")
            pieces = tuple(piece._replace(file=names[piece.file]) for piece in record.pieces)
            arrays[name] = merged._replace(pieces=merged.pieces + pieces)
    return names, parts[0]._replace(files={names[old]: files[old] for old in order}, arrays=arrays)


def flatten_with_names(tree: Any) -> tuple[dict[str, Any], Any]:
    """The leaves of a pytree by name, in JAX's order, and its treedef.

    A name is the path of dict keys, field names and indices: `optimizer/mean/up/kernel`. A bare leaf is `tree`.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in leaves_with_paths(tree):
        name = path or "tree"
        if reason := name_error(name):
            raise ValueError(f"The leaf {name[:100]!r} cannot be saved under that name: {reason}; rename it.")
        if name in leaves:
            raise ValueError(f"Two leaves of the tree are named {name!r}; rename one of them.")
        leaves[name] = leaf
    return leaves, jax.tree.structure(tree)
