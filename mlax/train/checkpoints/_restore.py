"""Restore a step: match saved arrays to target leaves, verify their hashes, place them like the target."""

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from mlax._jax import with_weak_type
from mlax.core import NoMatch, matches, no_match_message
from mlax.files import Header, InvalidFile, byte_view, read_header, safe_open
from mlax.train.checkpoints._manifest import DTYPES, ArrayRecord, PieceRecord, digest, intersect_blocks, storage_shape
from mlax.train.checkpoints._save import read_manifest
from mlax.train.checkpoints._step_folders import MANIFEST, StepFolder


class RestoredCheckpoint(NamedTuple):
    """A tree that was restored, from which step, and which later steps were passed over because they are damaged."""

    step: int
    tree: Any
    metrics: Mapping[str, float]
    notes: Mapping[str, Any]
    refused: tuple[tuple[int, str], ...] = ()  # (step, why), the newest first


class StepReader:
    """A step on the disk, opened: its manifest is right, and stands in the folder that it belongs to."""

    def __init__(self, folder: StepFolder):
        self.path = folder.path
        self.manifest = read_manifest(os.path.join(folder.path, MANIFEST))
        if self.manifest.step != folder.step:
            raise InvalidFile(f"{folder.path}: its manifest is of step {self.manifest.step}; folders were swapped.")
        self._headers: dict[str, Header] = {}
        self._held: dict[PieceRecord, np.ndarray] = {}  # of the array that is being read

    def whole(self, name: str) -> np.ndarray:
        """All of an array."""
        return self.part(name, ())

    def part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A block of an array: in slices of one step, as JAX asks for the part of one device."""
        record = self.manifest.arrays[name]
        full = index + (slice(None),) * (len(record.shape) - len(index))
        spans = [one.indices(length) for one, length in zip(full, record.shape, strict=True)]
        start, shape = tuple(span[0] for span in spans), tuple(max(0, span[1] - span[0]) for span in spans)
        self._held = {piece: array for piece, array in self._held.items() if piece in record.pieces}
        for piece in record.pieces:
            if (piece.start, piece.shape) == (start, shape):
                return self._piece(name, record, piece)
        block = np.empty(shape, DTYPES[record.dtype])
        for piece in record.pieces:
            if both := intersect_blocks((start, shape), (piece.start, piece.shape)):
                block[both[0]] = self._piece(name, record, piece)[both[1]]
        return block

    def _piece(self, name: str, record: ArrayRecord, piece: PieceRecord) -> np.ndarray:
        if piece not in self._held:
            try:
                self._held[piece] = self._read(name, record, piece)
            except OSError as failure:
                words = f"{os.path.join(self.path, piece.file)}: it cannot be read ({failure.strerror})"
                raise InvalidFile(f"{words}; it holds {name!r}.") from None
        return self._held[piece]

    def _read(self, name: str, record: ArrayRecord, piece: PieceRecord) -> np.ndarray:
        path, wanted = os.path.join(self.path, piece.file), self.manifest.files[piece.file]
        with safe_open(path) as (file, size):
            if size != wanted.size:
                raise InvalidFile(f"{path}: it has {size:,} bytes and should have {wanted.size:,}; it holds {name!r}.")
            if piece.file not in self._headers:
                header = read_header(file, size, path)
                if digest(header.raw) != wanted.header:
                    raise InvalidFile(f"{path}: its header is damaged, or another file's; it holds {name!r}.")
                self._headers[piece.file] = header
            entry: Any = self._headers[piece.file].entries.get(piece.name)
            dtype = DTYPES[record.dtype]
            if (
                entry is None
                or entry.shape != storage_shape(piece.shape, dtype)
                or entry.dtype not in (dtype, np.uint8)
            ):
                raise InvalidFile(f"{path}: it does not hold {piece.name!r} as the manifest says.")
            block = np.empty(piece.shape, dtype)
            file.seek(entry.start)
            read = file.readinto(byte_view(block)) if block.size else 0  # pyright: ignore[reportAttributeAccessIssue]
            if read != block.nbytes or digest(byte_view(block)) != piece.xxh3_128:
                raise InvalidFile(f"{path}: the array {name!r} is damaged: its hash does not match the manifest.")
        return block


_ADVICE = "pass only=(...) to restore some leaves, or names={saved: wanted} if they were renamed"


class TargetMismatch(ValueError):
    """What was saved does not fit the target."""

    def __init__(self, fault: str, advice: str):
        super().__init__(f"restore: {fault}; {advice}.")
        self.fault = fault


def match_leaves(
    saved: Mapping[str, ArrayRecord], leaves: Mapping[str, Any], only: Iterable[str], names: Mapping[str, str]
) -> dict[str, str]:
    """The saved name of each leaf that is to be restored."""
    wanted = _apply_renames(saved, names)
    for pattern in only:
        if not any(matches(pattern, name) for name in (*leaves, *wanted)):
            raise NoMatch(no_match_message(pattern, leaves))
    chosen = [name for name in leaves if any(matches(pattern, name) for pattern in only)]
    missing = [name for name in chosen if name not in wanted]
    extra = [name for name in wanted if name not in leaves and any(matches(pattern, name) for pattern in only)]
    if missing:
        only_saved = f"saved, but not in the target: {_first_names(extra)}"
        raise TargetMismatch(f"{_list_names(missing)} not saved ({only_saved})", _ADVICE)
    if extra:
        raise TargetMismatch(f"{_list_names(extra)} saved, but not in the target", _ADVICE)
    return {name: wanted[name] for name in chosen}


def _apply_renames(saved: Mapping[str, ArrayRecord], names: Mapping[str, str]) -> dict[str, str]:
    """The saved name by the name in the target."""
    found: dict[str, str] = {}
    for old in names:
        if not any(name == old or name.startswith(f"{old}/") for name in saved):
            raise NoMatch(f"restore: names: {no_match_message(old, saved)}")
    for name in saved:
        old = max((old for old in names if name == old or name.startswith(f"{old}/")), key=len, default="")
        new = names[old] + name.removeprefix(old) if old else name
        if new in found:
            raise ValueError(f"restore: {name!r} and {found[new]!r} would both be {new!r}; rename one of them.")
        found[new] = name
    return found


def _list_names(names: list[str]) -> str:
    return f"{_first_names(names)} {'is' if len(names) == 1 else 'are'}"


def _first_names(names: list[str]) -> str:
    few = ", ".join(repr(name) for name in names[:4]) or "nothing"
    return few if len(names) <= 4 else f"{few} and {len(names) - 4} more"


def restore_leaf(reading: StepReader, saved: str, name: str, target: Any) -> Any:
    """The array, as `target` is: a number, or an array of NumPy or of JAX, committed or not."""
    if isinstance(target, bool | int | float | complex):
        _check_leaf(reading, saved, name, np.asarray(target), None)
        return type(target)(reading.whole(saved).item())
    if isinstance(target, np.ndarray | np.generic):
        _check_leaf(reading, saved, name, target, None)
        return reading.whole(saved) if isinstance(target, np.ndarray) else reading.whole(saved)[()]
    if not isinstance(target, jax.Array | jax.ShapeDtypeStruct):
        raise TypeError(
            f"restore: the target has a {type(target).__name__} at {name!r}, but an array or a ShapeDtypeStruct is "
            "wanted; give a state as `init` makes it, or jax.eval_shape of that."
        )
    if jnp.issubdtype(target.dtype, jax.dtypes.prng_key):
        return _restore_keys(reading, saved, name, target)
    _check_leaf(reading, saved, name, target, None)
    sharding = _target_sharding(target)
    if sharding is None:
        array = jax.device_put(reading.whole(saved))
        if array.dtype != target.dtype:
            raise ValueError(f"restore: {name!r} is {target.dtype}, which JAX makes only with jax_enable_x64 on.")
    else:
        array = jax.make_array_from_callback(target.shape, sharding, lambda index: reading.part(saved, index or ()))
    return with_weak_type(array) if getattr(target, "weak_type", False) else array


def _restore_keys(reading: StepReader, saved: str, name: str, target: Any) -> jax.Array:
    data = jax.eval_shape(jax.random.key_data, target)
    impl = reading.manifest.arrays[saved].key
    mine = jax.random.key_impl(target) if isinstance(target, jax.Array) else impl
    _check_leaf(reading, saved, name, data, str(mine))
    keys = jax.random.wrap_key_data(jax.device_put(reading.whole(saved)), impl=mine)
    if keys.dtype != target.dtype:
        raise ValueError(f"restore: {name!r} was saved as keys of {impl}, but the target's are {target.dtype}.")
    sharding = _target_sharding(target)
    return keys if sharding is None else jax.make_array_from_callback(target.shape, sharding, lambda index: keys[index])


def _check_leaf(reading: StepReader, saved: str, name: str, target: Any, key: str | None) -> None:
    record = reading.manifest.arrays[saved]
    if record.key != key:
        words = {True: "plain numbers", False: "typed keys"}
        raise ValueError(
            f"restore: {name!r} was saved as {record.key or 'plain numbers'}, but the target has "
            f"{key or words[key is None]}; use the same algorithm, or jax.random.key_data or wrap_key_data."
        )
    if record.shape != target.shape or record.dtype != np.dtype(target.dtype).name:
        came, wanted = f"{record.dtype}{list(record.shape)}", f"{np.dtype(target.dtype).name}{list(target.shape)}"
        advice = "build the same model, or leave it out by only=(...) and convert it yourself"
        raise TargetMismatch(f"{name!r} was saved as {came}, but the target has {wanted}", advice)


def _target_sharding(target: Any) -> Any:
    """Where the array has to be; None where it may be anywhere."""
    sharding = target.sharding
    if isinstance(target, jax.Array) and not target.committed:
        return None
    return None if isinstance(getattr(sharding, "mesh", None), AbstractMesh) else sharding
