"""Restore a step: match saved arrays to the leaves of a target, verify their hashes, and place them like the target."""

import html
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh

from mlax._jax import is_typed_key, with_weak_type
from mlax.core import (
    STACKED,
    NoMatch,
    as_patterns,
    check_patterns,
    document_tuple,
    matches,
    no_match_message,
    short_summary,
    tabulate,
)
from mlax.files import Header, InvalidFile, byte_view, read_header, safe_open
from mlax.train.checkpoints._blocks import intersect_blocks, storage_shape
from mlax.train.checkpoints._manifest import (
    CHECKPOINT_DTYPES,
    ArrayRecord,
    PieceRecord,
    hash_bytes,
    read_manifest,
)
from mlax.train.checkpoints._step_folders import MANIFEST, StepFolder

_ADVICE = "pass only=(...) to restore some leaves, or names={saved: wanted} if they were renamed"


@document_tuple
class RestoredCheckpoint(NamedTuple):
    """A restored tree, the step that it is from, and the later steps that were skipped because they are damaged."""

    step: int  # of the checkpoint
    tree: Any  # like the target
    metrics: Mapping[str, float]  # that were saved with it
    notes: Mapping[str, Any]  # that were saved with it
    skipped: tuple[tuple[int, str], ...] = ()  # (step, reason), the newest first

    def __repr__(self) -> str:
        rest = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items() if value and name != "tree")
        return f"RestoredCheckpoint({rest}; {short_summary(self.tree)})"

    def __str__(self) -> str:
        return f"{self!r}\n{tabulate(self.tree)}"

    def _repr_html_(self) -> str:
        return f"<div>{html.escape(repr(self))}</div>{tabulate(self.tree)._repr_html_()}"


class TargetMismatch(ValueError):
    """The saved arrays do not match the target."""

    def __init__(self, fault: str, advice: str):
        super().__init__(f"restore: {fault}; {advice}.")
        self.fault = fault


def restore_step(
    folder: StepFolder, leaves: Mapping[str, Any], treedef: Any, only: str | tuple[str, ...], names: Mapping[str, str]
) -> RestoredCheckpoint:
    """Restore one step, like the leaves of the target."""
    reader = StepReader(folder)
    manifest = reader.manifest
    saved = _match_leaves(manifest.arrays, leaves, only, names)
    values = [_restore_leaf(reader, saved[n], n, leaf) if n in saved else leaf for n, leaf in leaves.items()]
    return RestoredCheckpoint(manifest.step, treedef.unflatten(values), manifest.metrics, manifest.notes)


class StepReader:
    """Reads the arrays of a step, and returns only bytes whose hash matches the manifest."""

    def __init__(self, folder: StepFolder):
        self.path = folder.path
        if os.path.islink(folder.path):  # which may lead anywhere
            raise InvalidFile(f"{folder.path}: it is a symbolic link; replace it by the folder that it leads to.")
        self.manifest = read_manifest(os.path.join(folder.path, MANIFEST))
        if self.manifest.step != folder.step:
            raise InvalidFile(f"{folder.path}: its manifest is of step {self.manifest.step}; folders were swapped.")
        self._headers: dict[str, Header] = {}
        self._pieces: dict[PieceRecord, np.ndarray] = {}  # cached, of the array that is being read

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """An array, or the block of it at `index`: slices with step 1, as JAX asks for a device's shard."""
        record = self.manifest.arrays[name]
        full = index + (slice(None),) * (len(record.shape) - len(index))
        spans = [part.indices(length) for part, length in zip(full, record.shape, strict=True)]
        start, shape = tuple(span[0] for span in spans), tuple(max(0, span[1] - span[0]) for span in spans)
        self._pieces = {piece: array for piece, array in self._pieces.items() if piece in record.pieces}
        for piece in record.pieces:
            if (piece.start, piece.shape) == (start, shape):
                return self._piece(name, record, piece)
        block = np.empty(shape, CHECKPOINT_DTYPES[record.dtype])
        for piece in record.pieces:
            if overlap := intersect_blocks((start, shape), (piece.start, piece.shape)):
                block[overlap[0]] = self._piece(name, record, piece)[overlap[1]]
        return block

    def _piece(self, name: str, record: ArrayRecord, piece: PieceRecord) -> np.ndarray:
        if piece not in self._pieces:
            try:
                self._pieces[piece] = self._read_piece(name, record, piece)
            except OSError as error:
                path = os.path.join(self.path, piece.file)
                raise InvalidFile(f"{path}: it cannot be read ({error.strerror}); it holds {name!r}.") from None
        return self._pieces[piece]

    def _read_piece(self, name: str, record: ArrayRecord, piece: PieceRecord) -> np.ndarray:
        path, expected = os.path.join(self.path, piece.file), self.manifest.files[piece.file]
        with safe_open(path) as (file, size):
            if size != expected.size:
                raise InvalidFile(f"{path}: it has {size:,} bytes, not {expected.size:,}; it holds {name!r}.")
            if piece.file not in self._headers:
                header = read_header(file, size, path)
                if hash_bytes(header.raw) != expected.header:
                    raise InvalidFile(f"{path}: its header is damaged, or belongs to another file; it holds {name!r}.")
                self._headers[piece.file] = header
            entry = self._headers[piece.file].entries.get(piece.name)
            dtype = CHECKPOINT_DTYPES[record.dtype]
            shape = storage_shape(piece.shape, dtype)
            if entry is None or entry.shape != shape or entry.dtype not in (dtype, np.uint8):
                raise InvalidFile(f"{path}: it does not hold {piece.name!r} as the manifest describes it.")
            block = np.empty(piece.shape, dtype)
            file.seek(entry.start)
            read = file.readinto(byte_view(block)) if block.size else 0  # pyright: ignore[reportAttributeAccessIssue]
            if read != block.nbytes or hash_bytes(byte_view(block)) != piece.xxh3_128:
                raise InvalidFile(f"{path}: the array {name!r} is damaged: its hash does not match the manifest.")
            if dtype == np.bool_ and block.view(np.uint8).max(initial=0) > 1:  # forged, as no operation makes them
                raise InvalidFile(f"{path}: the array {name!r} is boolean, but is not made of 0 and 1.")
        return block


def _match_leaves(
    saved: Mapping[str, ArrayRecord], leaves: Mapping[str, Any], only: str | tuple[str, ...], names: Mapping[str, str]
) -> dict[str, str]:
    """The saved name of each leaf that is to be restored."""
    available = _rename_saved(saved, names)
    only = as_patterns(only)
    check_patterns(only, (*leaves, *available))
    wanted = [name for name in leaves if matches(only, name)]
    missing = [name for name in wanted if name not in available]
    extra = [name for name in available if name not in leaves and matches(only, name)]
    if missing:
        fault = f"{_names_and_verb(missing)} not saved (saved, but not in the target: {_first_names(extra)})"
        renamed = _names_of_stacks(missing, extra)
        raise TargetMismatch(fault, f"stacks of layers have a name now: pass names={renamed}" if renamed else _ADVICE)
    if extra:
        raise TargetMismatch(f"{_names_and_verb(extra)} saved, but not in the target", _ADVICE)
    return {name: available[name] for name in wanted}


def _rename_saved(saved: Iterable[str], names: Mapping[str, str]) -> dict[str, str]:
    """The saved names, by the names that they have in the target."""
    saved = tuple(saved)
    renamed: dict[str, str] = {}
    for old in names:
        if not any(name == old or name.startswith(f"{old}/") for name in saved):
            raise NoMatch(f"restore: names: {no_match_message(old, saved)}")
    for name in saved:
        old = max((old for old in names if name == old or name.startswith(f"{old}/")), key=len, default="")
        new = names[old] + name.removeprefix(old) if old else name
        if new in renamed:
            raise ValueError(f"restore: {name!r} and {renamed[new]!r} would both be {new!r}; rename one of them.")
        renamed[new] = name
    return renamed


def _names_of_stacks(missing: list[str], extra: list[str]) -> dict[str, str]:
    """The `names` that insert the name of a stack, if the leaves that are missing are those saved without it."""
    renamed: dict[str, str] = {}
    for name in missing:
        above, stacked, _ = name.rpartition(f"/{STACKED}/")
        if not stacked or name.replace(f"/{STACKED}/", "/") not in extra:
            return {}
        renamed[above.replace(f"/{STACKED}/", "/")] = f"{above}/{STACKED}"
    return renamed


def _names_and_verb(names: list[str]) -> str:
    return f"{_first_names(names)} {'is' if len(names) == 1 else 'are'}"


def _first_names(names: list[str]) -> str:
    few = ", ".join(repr(name) for name in names[:4]) or "nothing"
    return few if len(names) <= 4 else f"{few} and {len(names) - 4} more"


def _restore_leaf(reader: StepReader, saved: str, name: str, target: Any) -> Any:
    """A saved array, as the target's leaf is: a Python scalar, a NumPy array, or a JAX array, committed or not."""
    if isinstance(target, bool | int | float | complex):
        _check_leaf(reader, saved, name, np.asarray(target), None)
        return type(target)(reader.read(saved).item())
    if isinstance(target, np.ndarray | np.generic):
        _check_leaf(reader, saved, name, target, None)
        return reader.read(saved) if isinstance(target, np.ndarray) else reader.read(saved)[()]
    if not isinstance(target, jax.Array | jax.ShapeDtypeStruct):
        raise TypeError(
            f"restore: the target has a {type(target).__name__} at {name!r}, but must have arrays or "
            "ShapeDtypeStructs; pass a state as `init` returns it, or jax.eval_shape of that."
        )
    if is_typed_key(target):
        return _restore_keys(reader, saved, name, target)
    _check_leaf(reader, saved, name, target, None)
    sharding = _target_sharding(target)
    if sharding is None:
        array = jax.device_put(reader.read(saved))
        if array.dtype != target.dtype:
            raise ValueError(f"restore: {name!r} is {target.dtype}, which JAX supports only with jax_enable_x64.")
    else:
        array = jax.make_array_from_callback(target.shape, sharding, lambda index: reader.read(saved, index or ()))
    return with_weak_type(array) if getattr(target, "weak_type", False) else array


def _restore_keys(reader: StepReader, saved: str, name: str, target: Any) -> jax.Array:
    data = jax.eval_shape(jax.random.key_data, target)
    saved_impl = reader.manifest.arrays[saved].key
    impl = jax.random.key_impl(target) if isinstance(target, jax.Array) else saved_impl
    _check_leaf(reader, saved, name, data, str(impl))
    keys = jax.random.wrap_key_data(jax.device_put(reader.read(saved)), impl=impl)
    if keys.dtype != target.dtype:
        raise ValueError(f"restore: {name!r} was saved as {saved_impl} keys, but the target has {target.dtype}.")
    sharding = _target_sharding(target)
    return keys if sharding is None else jax.make_array_from_callback(target.shape, sharding, lambda index: keys[index])


def _check_leaf(reader: StepReader, saved: str, name: str, target: Any, key: str | None) -> None:
    record = reader.manifest.arrays[saved]
    if record.key != key:
        raise ValueError(
            f"restore: {name!r} was saved as {record.key or 'a plain array'}, but the target has "
            f"{key or 'a plain array'}; use the same key algorithm, or jax.random.key_data or wrap_key_data."
        )
    if record.shape != target.shape or record.dtype != np.dtype(target.dtype).name:
        came, wanted = f"{record.dtype}{list(record.shape)}", f"{np.dtype(target.dtype).name}{list(target.shape)}"
        advice = "build the same model, or leave it out with only=(...) and convert it yourself"
        raise TargetMismatch(f"{name!r} was saved as {came}, but the target has {wanted}", advice)


def _target_sharding(target: Any) -> Any:
    """The sharding that the array must have, or None if JAX may choose."""
    sharding = target.sharding
    if isinstance(target, jax.Array) and not target.committed:
        return None
    return None if isinstance(getattr(sharding, "mesh", None), AbstractMesh) else sharding
