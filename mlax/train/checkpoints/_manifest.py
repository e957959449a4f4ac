"""The manifest of a step: its arrays, the files and blocks that hold them, and their hashes.

A JSON file whose first entry is the xxh3-128 hash of all bytes after that entry. It is written last: a folder without
a manifest, or with one whose hash does not match, is not a checkpoint.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import xxhash

from mlax._jax import leaves_with_paths
from mlax.files import DTYPE_NAMES as _PLAIN
from mlax.files import InvalidFile, is_count, is_storable, name_error, parse_json

_EXTRA_DTYPES = (
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float4_e2m1fn",
    "int2",
    "int4",
    "uint2",
    "uint4",
)
DTYPES: dict[str, np.dtype] = {dtype.name: dtype for dtype in _PLAIN}
DTYPES |= {name: np.dtype(getattr(ml_dtypes, name)) for name in _EXTRA_DTYPES}
DTYPES["complex128"] = np.dtype(np.complex128)
DTYPE_NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def to_storage(array: np.ndarray) -> np.ndarray:
    """The array as safetensors can hold it: as bytes on one more axis, if it does not have the dtype."""
    if is_storable(array.dtype):
        return array
    shape = storage_shape(array.shape, array.dtype)
    return array.reshape(-1).view(np.uint8).reshape(shape) if array.size else np.empty(shape, np.uint8)


def storage_shape(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    """The shape of what `stored` gives."""
    return shape if is_storable(dtype) else (*shape, dtype.itemsize)


VERSION = 1
MAX_MANIFEST_BYTES = 1 << 27
_PREFIX = b'{"xxh3_128": "'
_HASH = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(r"(?:arrays-\d{5}-of-\d{5}|process-\d{5}-\d{5})\.safetensors")


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


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as a file; one array a line."""
    files = {name: record._asdict() for name, record in manifest.files.items()}
    arrays = {
        name: {**record._asdict(), "pieces": [piece._asdict() for piece in record.pieces]}
        for name, record in manifest.arrays.items()
    }
    metrics = {name: _json_float(value) for name, value in manifest.metrics.items()}
    words = {"format": "mlax checkpoint", "version": VERSION, "step": manifest.step, "save": manifest.save}
    rest = f'",\n{json.dumps({**words, "metrics": metrics, "notes": manifest.notes})[1:-1]},\n'
    rest += f'"files": {_json_lines(files)},\n"arrays": {_json_lines(arrays)}}}\n'
    return _PREFIX + digest(rest.encode()).encode() + rest.encode()


def decode_manifest(data: bytes, path: str, *, whole: bool = True) -> Manifest:
    """The manifest in a file, every field of it checked. If it is `whole`, the pieces are the arrays, exactly."""
    hashed, rest = data[len(_PREFIX) : len(_PREFIX) + 32], data[len(_PREFIX) + 32 :]
    if not data.startswith(_PREFIX) or digest(rest).encode() != hashed:
        raise InvalidFile(f"{path}: its hash does not match what it says; it is damaged.")
    words = parse_json(data, path, depth=32)
    if words.get("format") != "mlax checkpoint" or words.get("version") != VERSION:
        raise InvalidFile(f"{path}: version {words.get('version')!r} is not known; this mlax reads {VERSION}.")
    try:
        files = {name: FileRecord(**record) for name, record in words["files"].items()}
        arrays = {name: _array_record(record) for name, record in words["arrays"].items()}
        metrics = {name: float(value) for name, value in words["metrics"].items()}
        manifest = Manifest(words["step"], words["save"], metrics, words["notes"], files, arrays)
    except (KeyError, TypeError, ValueError, AttributeError) as failure:
        raise InvalidFile(f"{path}: it is not laid out as a manifest ({failure!r}).") from None
    for fault in _manifest_faults(manifest, whole):
        raise InvalidFile(f"{path}: {fault}.")
    return manifest


def _json_lines(records: dict[str, Any]) -> str:
    return "{" + ",".join(f"\n{json.dumps(name)}: {json.dumps(record)}" for name, record in records.items()) + "}"


def _json_float(value: float) -> float | str:
    return value if abs(value) < float("inf") else str(value)  # JSON has no nan and no inf


def _array_record(words: dict[str, Any]) -> ArrayRecord:
    pieces = [
        PieceRecord(**{**piece, "start": tuple(piece["start"]), "shape": tuple(piece["shape"])})
        for piece in words["pieces"]
    ]
    return ArrayRecord(**{**words, "shape": tuple(words["shape"]), "pieces": tuple(pieces)})


def _manifest_faults(manifest: Manifest, whole: bool) -> Iterable[str]:
    if not is_count(manifest.step) or not isinstance(manifest.save, str) or not isinstance(manifest.notes, dict):
        yield "its step, save or notes are none"
    for name, record in manifest.files.items():
        if (
            not _FILE_NAME.fullmatch(name)
            or not is_count(record.size)
            or not _are_hashes(record.header, record.xxh3_128)
        ):
            yield f"{name[:100]!r} is no file of a checkpoint"
    for name, array in manifest.arrays.items():
        if (why := name_error(name)) or array.dtype not in DTYPES or not isinstance(array.key, str | None):
            yield f"the array {name[:100]!r} is described wrongly ({why or array.dtype})"
        for piece in array.pieces:
            numbers = (*array.shape, *piece.start, *piece.shape)
            if piece.file not in manifest.files or not isinstance(piece.name, str) or not _are_hashes(piece.xxh3_128):
                yield f"a piece of {name!r} lies nowhere"
            if not all(is_count(number) for number in numbers):
                yield f"a piece of {name!r} has no shape"
        if whole and not is_partition(array.shape, [(piece.start, piece.shape) for piece in array.pieces]):
            yield f"the pieces of {name!r} are not the whole of it"


def _are_hashes(*words: Any) -> bool:
    return all(isinstance(word, str) and _HASH.fullmatch(word) for word in words)


def merge_manifests(parts: Sequence[Manifest]) -> tuple[dict[str, str], Manifest]:
    """New names for the files, by their old ones; and the manifest of all."""
    files = {name: record for part in parts for name, record in part.files.items()}
    order = sorted(files)
    names = {old: f"arrays-{at + 1:05d}-of-{len(order):05d}.safetensors" for at, old in enumerate(order)}
    arrays: dict[str, ArrayRecord] = {}
    for index, part in enumerate(parts):
        if part.save != parts[0].save or part.arrays.keys() != parts[0].arrays.keys():
            raise InvalidFile(f"Process {index} saves other arrays than process 0; save one and the same tree in all.")
        for name, record in part.arrays.items():
            before = arrays.get(name, record._replace(pieces=()))
            if before[:3] != record[:3]:
                raise InvalidFile(f"{name!r} is {record[:2]} in process {index} but {before[:2]} in another.")
            moved = tuple(piece._replace(file=names[piece.file]) for piece in record.pieces)
            arrays[name] = before._replace(pieces=before.pieces + moved)
    return names, parts[0]._replace(files={names[old]: files[old] for old in order}, arrays=arrays)


Block = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins, and its shape


def is_partition(shape: tuple[int, ...], blocks: Sequence[Block], axis: int = 0) -> bool:
    """Whether the blocks, laid as a sharding lays them, hold each element of the shape exactly once."""
    if any(len(start) != len(shape) or len(size) != len(shape) for start, size in blocks):
        return False
    if axis == len(shape):
        return len(blocks) == 1
    if math.prod(shape) == 0:  # nothing to hold; but to be there at all takes one block
        return bool(blocks) and all(math.prod(size) == 0 for _, size in blocks)
    rows: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for start, size in blocks:
        rows[start[axis], size[axis]].append((start, size))
    at = 0
    for begin, length in sorted(rows):
        if begin != at or length == 0:
            return False
        at += length
    return at == shape[axis] and all(is_partition(shape, row, axis + 1) for row in rows.values())


def split_block(start: tuple[int, ...], array: np.ndarray, most: int) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """The block in blocks of at most `most` bytes where that is possible, without a copy."""
    axis = next((axis for axis, length in enumerate(array.shape) if length > 1), None)
    if array.nbytes <= most or axis is None:
        yield start, array
        return
    rows = max(1, most * array.shape[axis] // array.nbytes)
    for at in range(0, array.shape[axis], rows):
        begin = (*start[:axis], start[axis] + at, *start[axis + 1 :])
        yield from split_block(begin, array[(slice(None),) * axis + (slice(at, at + rows),)], most)


def intersect_blocks(a: Block, b: Block) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where in `a`, and where in `b`, the elements lie that are in both; None if there are none."""
    low = [max(x, y) for x, y in zip(a[0], b[0], strict=True)]
    high = [min(x + m, y + n) for x, m, y, n in zip(*a, *b, strict=True)]
    if any(end <= begin for begin, end in zip(low, high, strict=True)):
        return None
    inside_a = tuple(slice(begin - x, end - x) for begin, end, x in zip(low, high, a[0], strict=True))
    inside_b = tuple(slice(begin - x, end - x) for begin, end, x in zip(low, high, b[0], strict=True))
    return inside_a, inside_b


def flatten_with_names(tree: Any) -> tuple[dict[str, Any], Any]:
    """The leaves by name, in JAX's order, and the structure that puts them together again.

    Dict keys, field names and indices are joined by slashes: `optimizer/mean/up/kernel`. A bare leaf is `tree`.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in leaves_with_paths(tree):
        name = path or "tree"
        if why := name_error(name):
            raise ValueError(f"The leaf {name[:100]!r} cannot be saved by that name; {why}; rename it.")
        if name in leaves:
            raise ValueError(f"Two leaves of the tree are called {name!r}; rename one of them.")
        leaves[name] = leaf
    return leaves, jax.tree.structure(tree)
