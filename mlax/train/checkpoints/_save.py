"""Save one step in the background: write a temporary folder, fsync it, then rename it."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import xxhash
from jax.core import Tracer

from mlax.files import (
    InvalidFile,
    SerializedFile,
    atomic_write,
    fsync_folder,
    make_folder,
    require_space,
    safe_open,
    serialize,
    to_file_layout,
    write_synced,
)
from mlax.train.checkpoints._manifest import (
    DTYPE_NAMES,
    MAX_MANIFEST_BYTES,
    ArrayRecord,
    FileRecord,
    Manifest,
    PieceRecord,
    decode_manifest,
    digest,
    encode_manifest,
    merge_manifests,
    split_block,
    to_storage,
)
from mlax.train.checkpoints._multiprocess import ProcessGroup
from mlax.train.checkpoints._step_folders import MANIFEST, new_step_path, remove_path, step_folders


class Piece(NamedTuple):
    """A block of an array, and where in the array it begins."""

    start: tuple[int, ...]
    array: np.ndarray


class HostCopy(NamedTuple):
    """One leaf: what it is, and the pieces of it that this process has to write."""

    shape: tuple[int, ...]
    dtype: str
    key: str | None  # the algorithm, if the leaf holds typed keys
    pieces: list[Piece]


class SaveJob(NamedTuple):
    """What is to be saved, and where to."""

    folder: str
    step: int
    arrays: Mapping[str, HostCopy]
    metrics: Mapping[str, float]
    notes: Mapping[str, Any]
    group: ProcessGroup
    number: int  # of this save among those of the group
    most: int  # bytes of a file
    patience: float  # seconds to wait for the other processes

    @property
    def id(self) -> str:
        """The name of the save among all that there ever were."""
        return f"{self.group.id}-{self.number}"

    def beside(self, what: str) -> str:
        """A path for a moment: it tells everyone whose it is."""
        return os.path.join(self.folder, f".{what}-{self.step:08d}-{self.id}")


def write_checkpoint(save: SaveJob) -> None:
    """Write the step; when this returns, it is on the disk. If it raises, there is nothing of it."""
    plan = plan_files(save.arrays, save.group.index, save.most)
    temporary = save.beside("saving")
    if save.group.index > 0:
        _wait_until(save, lambda: os.path.isdir(temporary), lambda: os.path.exists(save.beside("failed")), "begin")
    try:
        with require_space(save.folder, plan.needed):
            if save.group.index == 0:
                make_folder(save.folder)
                os.mkdir(temporary)
            files, arrays = write_files(plan, temporary)
            part = Manifest(save.step, save.id, save.metrics, save.notes, files, arrays)
            if save.group.index > 0:
                atomic_write(os.path.join(temporary, _part_name(save.group.index)), [encode_manifest(part)])
            else:
                _commit(save, temporary, [part, *_read_parts(save, temporary)])
    except BaseException:
        _abort(save, temporary)
        raise
    if save.group.index > 0:
        _wait_until(save, lambda: not os.path.isdir(temporary), lambda: False, "finish")
        if not any(
            _read_save_id(found.path) == save.id for found in step_folders(save.folder) if found.step == save.step
        ):
            raise RuntimeError(f"{save.folder}: step {save.step} was given up by the first process; see its output.")


def _commit(save: SaveJob, temporary: str, parts: list[Manifest]) -> None:
    """The first process: put the parts together, and give the folder its name."""
    names, manifest = merge_manifests(parts)
    for old, new in names.items():
        os.rename(os.path.join(temporary, old), os.path.join(temporary, new))
    for index in range(1, save.group.count):
        os.unlink(os.path.join(temporary, _part_name(index)))
    write_synced(os.path.join(temporary, MANIFEST), [encode_manifest(manifest)])
    fsync_folder(temporary)
    path = new_step_path(save.folder, save.step)
    os.rename(temporary, path)
    try:
        fsync_folder(save.folder)
    except OSError:
        os.rename(path, temporary)  # a name that may be lost again acknowledges nothing
        raise


def _read_parts(save: SaveJob, temporary: str) -> Iterator[Manifest]:
    for index in range(1, save.group.count):
        path, failed = os.path.join(temporary, _part_name(index)), os.path.join(temporary, f"failed-{index:05d}")
        _wait_until(save, partial(os.path.exists, path), partial(os.path.exists, failed), "write", index)
        yield read_manifest(path, whole=False)


def _abort(save: SaveJob, temporary: str) -> None:
    try:
        if save.group.index == 0:
            remove_path(temporary)
        if save.group.count > 1:  # tell the others, who would wait in vain
            failed = os.path.join(temporary, f"failed-{save.group.index:05d}")
            write_synced(failed if save.group.index > 0 else save.beside("failed"), [])
    except OSError:
        pass  # the failure that led here is the one to hear of


def read_manifest(path: str, *, whole: bool = True) -> Manifest:
    """The manifest in this file, checked."""
    try:
        with safe_open(path) as (file, size):
            if size > MAX_MANIFEST_BYTES:
                raise InvalidFile(f"{path}: a manifest has at most {MAX_MANIFEST_BYTES:,} bytes, not {size:,}.")
            return decode_manifest(file.read(size), path, whole=whole)
    except OSError as failure:
        raise InvalidFile(f"{path}: it cannot be read ({failure.strerror}).") from None


def _read_save_id(path: str) -> str | None:
    try:
        return read_manifest(os.path.join(path, MANIFEST)).save
    except InvalidFile:
        return None


def _wait_until(
    save: SaveJob, there: Callable[[], bool], failed: Callable[[], bool], verb: str, index: int = 0
) -> None:
    """Until something is there; by looking, since a thread in the background must not use collectives."""
    end, pause = time.monotonic() + save.patience, 0.002
    while not there():
        if failed():
            raise RuntimeError(f"{save.folder}: process {index} failed to {verb} step {save.step}; see its output.")
        if time.monotonic() > end:
            raise TimeoutError(
                f"{save.folder}: process {index} did not {verb} step {save.step} within {save.patience:g} seconds."
            )
        time.sleep(pause)
        pause = min(0.1, 1.5 * pause)


def _part_name(index: int) -> str:
    return f"part-{index:05d}.json"


def copy_to_host(leaves: Mapping[str, Any], group: ProcessGroup) -> dict[str, HostCopy]:
    """Copies of the leaves: of each piece one, by the process whose device holds the first replica of it.

    All transfers are begun before the first is waited for. On a CPU the array of NumPy is the buffer itself, which
    the next step may be given to write over: hence a copy.
    """
    plain = {name: _as_plain_array(name, leaf) for name, leaf in leaves.items()}
    shards = {name: _local_shards(leaf, group) for name, leaf in plain.items() if isinstance(leaf, jax.Array)}
    for pieces in shards.values():
        for _, data in pieces:
            data.copy_to_host_async()
    found: dict[str, HostCopy] = {}
    for name, leaf in plain.items():
        if isinstance(leaf, jax.Array):
            copied = _aliases_buffer(leaf)
            pieces = [Piece(start, _to_numpy(data, copied)) for start, data in shards[name]]
        else:
            pieces = [Piece((0,) * leaf.ndim, to_file_layout(leaf.copy()))] if group.index == 0 else []
        key = None if leaf is leaves[name] or not _is_key(leaves[name]) else str(jax.random.key_impl(leaves[name]))
        found[name] = HostCopy(leaf.shape, DTYPE_NAMES[leaf.dtype], key, pieces)
    return found


def _as_plain_array(name: str, leaf: Any) -> jax.Array | np.ndarray:
    if isinstance(leaf, Tracer):
        raise TypeError(f"save: {name!r} is being traced; save outside of jit, after the step has returned.")
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise ValueError(f"save: the buffer of {name!r} was donated or deleted; save the state that came back.")
        return jax.random.key_data(leaf) if _is_key(leaf) else leaf
    if not isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        raise TypeError(f"save: {name!r} is a {type(leaf).__name__}, but leaves are arrays or numbers; try notes.")
    array = np.asarray(leaf)
    if array.dtype not in DTYPE_NAMES:
        raise TypeError(f"save: {name!r} has the dtype {array.dtype}, which is no number's; leave it out, or in notes.")
    return array


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf.dtype, np.dtype)  # JAX's own dtypes are those of keys


def _local_shards(leaf: jax.Array, group: ProcessGroup) -> list[tuple[tuple[int, ...], jax.Array]]:
    if leaf.is_fully_addressable:
        if group.index > 0:
            return []  # an array of one process alone: the first process saves its own
        if leaf.is_fully_replicated:
            return [((0,) * leaf.ndim, leaf.addressable_data(0))]
    mine = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    return [(tuple(part.start or 0 for part in shard.index), shard.data) for shard in mine]


def _aliases_buffer(leaf: jax.Array) -> bool:
    """Whether NumPy sees the buffer itself: on a CPU, and in the memory of the host."""
    sharding = leaf.sharding
    return sharding.memory_kind not in (None, "device") or next(iter(sharding.device_set)).platform == "cpu"


def _to_numpy(data: jax.Array, copied: bool) -> np.ndarray:
    array = np.asarray(data)
    return to_file_layout(array.copy() if copied else array)


_PIECE_RECORD_BYTES = 512  # bytes that a piece takes in a manifest, about


class WritePlan(NamedTuple):
    """The files to be written; the arrays' records as far as they are known, by file and name of each piece."""

    files: dict[str, SerializedFile]
    arrays: dict[str, ArrayRecord]

    @property
    def needed(self) -> int:
        """How many bytes that will be, with the manifest."""
        pieces = sum(len(record.pieces) for record in self.arrays.values())
        return sum(file.size for file in self.files.values()) + (pieces + len(self.arrays) + 8) * _PIECE_RECORD_BYTES


def plan_files(arrays: Mapping[str, HostCopy], process: int, most: int) -> WritePlan:
    """Pieces to files of at most `most` bytes each, in the order of their names."""
    contents: list[dict[str, np.ndarray]] = [{}]
    records: dict[str, ArrayRecord] = {}
    room = most
    for name, array in arrays.items():
        blocks = [block for piece in array.pieces for block in split_block(*piece, most)]
        pieces: list[PieceRecord] = []
        for start, block in blocks:
            if block.nbytes > room and contents[-1]:
                contents.append({})
                room = most
            label = name if block.shape == array.shape else f"{name}@{','.join(map(str, start))}"
            contents[-1][label] = to_storage(block)
            room -= block.nbytes
            pieces.append(PieceRecord(_file_name(process, len(contents)), label, start, block.shape, ""))
        records[name] = ArrayRecord(array.shape, array.dtype, array.key, tuple(pieces))
    files = {
        _file_name(process, number + 1): serialize(content, {}) for number, content in enumerate(contents) if content
    }
    return WritePlan(files, records)


def write_files(plan: WritePlan, folder: str) -> tuple[dict[str, FileRecord], dict[str, ArrayRecord]]:
    """Write the files into the folder, synced, and give the records with all hashes."""
    files: dict[str, FileRecord] = {}
    hashes: dict[tuple[str, str], str] = {}
    for name, file in plan.files.items():
        whole = xxhash.xxh3_128(file.header)
        for label, view in file.arrays.items():
            hashes[name, label] = digest(view)
            whole.update(view)
        write_synced(os.path.join(folder, name), [file.header, *file.arrays.values()])
        files[name] = FileRecord(file.size, digest(file.header), whole.hexdigest())
    arrays = {
        name: record._replace(
            pieces=tuple(piece._replace(xxh3_128=hashes[piece.file, piece.name]) for piece in record.pieces)
        )
        for name, record in plan.arrays.items()
    }
    return files, arrays


def _file_name(process: int, number: int) -> str:
    return f"process-{process:05d}-{number:05d}.safetensors"
