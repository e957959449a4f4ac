"""Save one step: copy it to the host, then write a temporary folder in the background, fsync it and rename it."""

import contextlib
import io
import itertools
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import xxhash
from jax.core import Tracer

from mlax._jax import is_typed_key
from mlax.files import (
    MAX_AXES,
    MAX_HEADER_BYTES,
    MAX_NAME_LENGTH,
    InvalidFile,
    SerializedFile,
    atomic_write,
    check_space,
    fsync_folder,
    make_folder,
    read_header,
    serialize,
    to_file_layout,
    translate_no_space,
    write_synced,
)
from mlax.train.checkpoints._blocks import split_block, storage_shape, to_storage
from mlax.train.checkpoints._manifest import (
    CHECKPOINT_DTYPE_NAMES,
    ArrayRecord,
    FileRecord,
    Manifest,
    PieceRecord,
    decode_manifest,
    encode_manifest,
    hash_bytes,
    merge_manifests,
    read_manifest,
)
from mlax.train.checkpoints._multiprocess import ProcessGroup, wait_until
from mlax.train.checkpoints._step_folders import (
    MANIFEST,
    new_step_path,
    remove_leftovers,
    remove_path,
    step_folders,
    temporary_path,
    writer_lock,
)

_RECORD_BYTES = 512  # about the size of an array's or a piece's record in the manifest


class Piece(NamedTuple):
    """A block of an array, and the index at which it starts."""

    start: tuple[int, ...]
    array: np.ndarray


class HostCopy(NamedTuple):
    """A leaf on the host: its description, and the pieces of it that this process writes."""

    shape: tuple[int, ...]
    dtype: str
    key: str | None  # the algorithm, if the leaf holds typed keys
    pieces: list[Piece]


def copy_to_host(leaves: Mapping[str, Any], group: ProcessGroup) -> dict[str, HostCopy]:
    """Copy the leaves to the host; each shard once, in the process that holds its first replica.

    All transfers start before the first one is awaited.
    """
    plain = {name: _as_plain_array(name, leaf) for name, leaf in leaves.items()}
    shards = {name: _local_shards(leaf, group) for name, leaf in plain.items() if isinstance(leaf, jax.Array)}
    for pieces in shards.values():
        for _, data in pieces:
            data.copy_to_host_async()
    copies: dict[str, HostCopy] = {}
    for name, leaf in plain.items():
        if isinstance(leaf, jax.Array):
            aliased = _aliases_host_memory(leaf)
            pieces = [Piece(start, _to_numpy(data, aliased)) for start, data in shards[name]]
        else:
            pieces = [Piece((0,) * leaf.ndim, to_file_layout(leaf.copy()))] if group.index == 0 else []
        key = str(jax.random.key_impl(leaves[name])) if is_typed_key(leaves[name]) else None
        copies[name] = HostCopy(leaf.shape, CHECKPOINT_DTYPE_NAMES[leaf.dtype], key, pieces)
    return copies


def _as_plain_array(name: str, leaf: Any) -> jax.Array | np.ndarray:
    """The leaf as an ordinary array: for typed keys, their key data."""
    if isinstance(leaf, Tracer):
        raise TypeError(f"save: {name!r} is being traced; save outside of jit, after the step has returned.")
    if isinstance(leaf, jax.Array):
        return _check_axes(name, jax.random.key_data(leaf) if is_typed_key(leaf) else leaf)
    if not isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        raise TypeError(f"save: {name!r} is a {type(leaf).__name__}, but leaves are arrays or scalars; use notes.")
    array = np.asarray(leaf)
    if array.dtype not in CHECKPOINT_DTYPE_NAMES:
        raise TypeError(f"save: {name!r} has dtype {array.dtype}, which is not numeric; leave it out, or use notes.")
    return _check_axes(name, array)


def _check_axes(name: str, array: Any) -> Any:
    if (axes := len(storage_shape(array.shape, array.dtype))) > MAX_AXES:
        raise ValueError(f"save: {name!r} takes {axes} axes to store, and at most {MAX_AXES} are allowed; reshape it.")
    return array


def _local_shards(leaf: jax.Array, group: ProcessGroup) -> list[tuple[tuple[int, ...], jax.Array]]:
    if leaf.is_fully_addressable:
        if group.index > 0:
            return []  # local to each process: the first process saves its copy
        if leaf.is_fully_replicated:
            return [((0,) * leaf.ndim, leaf.addressable_data(0))]
    shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    return [(tuple(part.start or 0 for part in shard.index), shard.data) for shard in shards]


def _aliases_host_memory(leaf: jax.Array) -> bool:
    """Whether `np.asarray` is a view of the buffer: on a CPU, and in host memory."""
    sharding = leaf.sharding
    return sharding.memory_kind not in (None, "device") or next(iter(sharding.device_set)).platform == "cpu"


def _to_numpy(data: jax.Array, aliased: bool) -> np.ndarray:
    array = np.asarray(data)
    return to_file_layout(array.copy() if aliased else array)  # a view's buffer may be donated to the next step


class SaveJob(NamedTuple):
    """Everything that the background thread needs to write a step."""

    folder: str
    step: int
    arrays: Mapping[str, HostCopy]
    metrics: Mapping[str, float]
    notes: Mapping[str, Any]
    group: ProcessGroup
    number: int  # counts the saves of the group
    file_bytes: int  # the maximum size of a file
    timeout: float  # seconds to wait for other processes

    @property
    def id(self) -> str:
        """A unique name of this save, the same in all processes of the group."""
        return f"{self.group.id}-{self.number}"

    def temporary(self, purpose: str) -> str:
        """A temporary path that belongs to this save."""
        return temporary_path(self.folder, purpose, self.step, self.id)

    def process(self, index: int) -> str:
        """The name of a process in errors."""
        return f"{self.folder}: process {index}"


def write_checkpoint(job: SaveJob) -> str | None:
    """Write the step. If this returns, it is on disk, in the first process at this path; else nothing of it remains."""
    plan = _plan_files(job.arrays, job.group.index, job.file_bytes)
    temporary = job.temporary("saving")
    if job.group.index > 0:
        _wait_for_folder(job, temporary)
    try:
        with translate_no_space(job.folder, plan.size), _own_folder(job):
            check_space(job.folder, plan.size)
            if job.group.index == 0:
                os.mkdir(temporary)
            files, arrays = _write_files(plan, temporary)
            part = Manifest(job.step, job.id, job.metrics, job.notes, files, arrays)
            if job.group.index == 0:
                return _commit(job, temporary, [part, *_read_other_parts(job, temporary)])
            atomic_write(os.path.join(temporary, _part_name(job.group.index)), [encode_manifest(part)])
    except BaseException:
        _abort(job, temporary)
        raise
    _wait_for_commit(job, temporary)
    return None


@contextlib.contextmanager
def _own_folder(job: SaveJob) -> Iterator[None]:
    """In the first process: create the folder, lock it, and free the space of earlier interrupted saves."""
    if job.group.index > 0:
        yield
        return
    make_folder(job.folder)
    with writer_lock(job.folder, job.timeout) as is_owner:
        if is_owner and job.number == 1:  # later ones may delete what tells another process of a failure
            remove_leftovers(job.folder)
        yield


class _WritePlan(NamedTuple):
    """The files to write, and the records of the arrays, whose pieces have no hashes yet."""

    files: dict[str, SerializedFile]
    arrays: dict[str, ArrayRecord]

    @property
    def size(self) -> int:
        """The bytes that this will take, manifest included."""
        pieces = sum(len(record.pieces) for record in self.arrays.values())
        return sum(file.size for file in self.files.values()) + (pieces + len(self.arrays) + 8) * _RECORD_BYTES


def _plan_files(arrays: Mapping[str, HostCopy], process: int, file_bytes: int) -> _WritePlan:
    """Distribute the pieces over files of at most `file_bytes`, whose headers can be read, in order."""
    contents: list[dict[str, np.ndarray]] = [{}]
    records: dict[str, ArrayRecord] = {}
    free, free_header = file_bytes, MAX_HEADER_BYTES
    numbers = itertools.count(1)
    for name, array in arrays.items():
        pieces: list[PieceRecord] = []
        for start, block in (block for piece in array.pieces for block in split_block(*piece, file_bytes)):
            label = name if block.shape == array.shape else _block_label(name, numbers, arrays)
            free_header -= _RECORD_BYTES + 4 * len(label)
            if (block.nbytes > free or free_header < 0) and contents[-1]:
                contents.append({})
                free, free_header = file_bytes, MAX_HEADER_BYTES
            contents[-1][label] = to_storage(block)
            free -= block.nbytes
            pieces.append(PieceRecord(_file_name(process, len(contents)), label, start, block.shape, ""))
        records[name] = ArrayRecord(array.shape, array.dtype, array.key, tuple(pieces))
    files = {_file_name(process, n): serialize(content, {}) for n, content in enumerate(contents, 1) if content}
    return _WritePlan(files, records)


def _block_label(name: str, numbers: Iterator[int], arrays: Mapping[str, HostCopy]) -> str:
    """The name of a block of an array in its file: `3@up/kernel`, unless an array is called that."""
    labels = (f"{number}@{name}"[:MAX_NAME_LENGTH] for number in numbers)
    return next(label for label in labels if label not in arrays)


def _write_files(plan: _WritePlan, folder: str) -> tuple[dict[str, FileRecord], dict[str, ArrayRecord]]:
    """Write and fsync the files; returns the records of the files, and of the arrays with their hashes."""
    files: dict[str, FileRecord] = {}
    hashes: dict[tuple[str, str], str] = {}
    for name, file in plan.files.items():
        # What `restore` would refuse must not be acknowledged as saved.
        read_header(io.BytesIO(file.header), file.size, os.path.join(folder, name))
        whole = xxhash.xxh3_128(file.header)
        for label, view in file.arrays.items():
            hashes[name, label] = hash_bytes(view)
            whole.update(view)
        write_synced(os.path.join(folder, name), [file.header, *file.arrays.values()])
        files[name] = FileRecord(file.size, hash_bytes(file.header), whole.hexdigest())
    arrays = {
        name: record._replace(
            pieces=tuple(piece._replace(xxh3_128=hashes[piece.file, piece.name]) for piece in record.pieces)
        )
        for name, record in plan.arrays.items()
    }
    return files, arrays


def _commit(job: SaveJob, temporary: str, parts: list[Manifest]) -> str:
    """In the first process: merge the parts, write the manifest, and rename the folder to its final path."""
    names, manifest = merge_manifests(parts)
    for old, new in names.items():
        os.rename(os.path.join(temporary, old), os.path.join(temporary, new))
    for index in range(1, job.group.count):
        os.unlink(os.path.join(temporary, _part_name(index)))
    encoded = encode_manifest(manifest)
    decode_manifest(encoded, os.path.join(temporary, MANIFEST))  # as above
    write_synced(os.path.join(temporary, MANIFEST), [encoded])
    fsync_folder(temporary)
    path = new_step_path(job.folder, job.step)
    os.rename(temporary, path)
    try:
        fsync_folder(job.folder)
    except OSError:
        os.rename(path, temporary)  # a rename that a crash may undo does not count as saved
        raise
    return path


def _abort(job: SaveJob, temporary: str) -> None:
    try:
        if job.group.index == 0:
            remove_path(temporary)
        if job.group.count > 1:  # or the other processes would wait until their timeout
            failed = os.path.join(temporary, _failure_name(job.group.index))
            write_synced(failed if job.group.index > 0 else job.temporary("failed"), [])
    except OSError:
        pass  # the error that led here is the one to report


def _wait_for_folder(job: SaveJob, temporary: str) -> None:
    failed = partial(os.path.exists, job.temporary("failed"))
    wait_until(partial(os.path.isdir, temporary), failed, job.timeout, job.process(0), f"begin step {job.step}")


def _read_other_parts(job: SaveJob, temporary: str) -> Iterator[Manifest]:
    for index in range(1, job.group.count):
        path = os.path.join(temporary, _part_name(index))
        failed = partial(os.path.exists, os.path.join(temporary, _failure_name(index)))
        wait_until(partial(os.path.exists, path), failed, job.timeout, job.process(index), f"write step {job.step}")
        yield read_manifest(path, partial=True)


def _wait_for_commit(job: SaveJob, temporary: str) -> None:
    task = f"finish step {job.step}"
    wait_until(lambda: not os.path.isdir(temporary), lambda: False, job.timeout, job.process(0), task)
    saved = [found.path for found in step_folders(job.folder) if found.step == job.step]
    if not any(_read_save_id(path) == job.id for path in saved):
        raise RuntimeError(f"{job.process(0)} gave up saving step {job.step}; see its output.")


def _read_save_id(path: str) -> str | None:
    try:
        return read_manifest(os.path.join(path, MANIFEST)).save
    except InvalidFile:
        return None


def _file_name(process: int, number: int) -> str:
    return f"process-{process:05d}-{number:05d}.safetensors"


def _part_name(index: int) -> str:
    return f"part-{index:05d}.json"


def _failure_name(index: int) -> str:
    return f"failed-{index:05d}"
