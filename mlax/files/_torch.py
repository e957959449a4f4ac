"""load_torch: the tensors of a file that `torch.save` has written, without pickle and without PyTorch.

The file is a zip archive (https://docs.pytorch.org/docs/stable/notes/serialization.html): data.pkl describes the
tensors, and data/0, data/1 and so on are their storages, which are memory-mapped.
"""

import math
import mmap
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mlax.files._io import InvalidFile, is_count, safe_open
from mlax.files._load import check_booleans, read_index
from mlax.files._pickle import MAX_PICKLE_BYTES, Name, interpret
from mlax.files._safetensors import MAX_ARRAYS, MAX_AXES, Entry, name_error
from mlax.files._zip import Member, read_members

MAX_DEPTH, MAX_VALUES, MAX_NAME_BYTES, MAX_INDEX_FILES = 32, 200_000, 1 << 24, 1000
MAX_SHARING = 16  # bytes of tensors for each byte of the file, since several may share a storage

_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number of PyTorch before 1.6, as a pickle
_ADVICE = "if you trust it, load it in PyTorch and write its state dict alone, torch.save(model.state_dict(), path)"
_DTYPES = {
    f"torch.{dtype.name}": dtype
    for dtype in map(
        np.dtype,
        (
            *(np.float16, np.float32, np.float64, np.complex64, np.complex128, np.bool_, ml_dtypes.bfloat16),
            *(np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
            *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e8m0fnu),
            *(ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz),
        ),
    )
}
_STORAGE_DTYPES = {
    f"torch.{name}Storage": _DTYPES[f"torch.{dtype}"]
    for name, dtype in {
        "Float": "float32",
        "Double": "float64",
        "Half": "float16",
        "BFloat16": "bfloat16",
        "ComplexFloat": "complex64",
        "ComplexDouble": "complex128",
        "Byte": "uint8",
        "Char": "int8",
        "Short": "int16",
        "Int": "int32",
        "Long": "int64",
        "Bool": "bool",
    }.items()
} | {"torch.storage.UntypedStorage": _DTYPES["torch.uint8"]}


def load_torch(
    path: str | os.PathLike[str], *, key: str | None = None, within: str | os.PathLike[str] | None = None
) -> dict[str, np.ndarray]:
    """Load a PyTorch state dict, as `torch.save` writes it (.pt, .pth, .bin), without pickle and without PyTorch.

        state = files.load_torch("pytorch_model.bin")                # torch.save(model.state_dict(), ...)
        state = files.load_torch("checkpoint.pt", key="state_dict")  # torch.save({"state_dict": ..., "epoch": 3}, ...)

    The result is a flat dict of NumPy arrays in the order of the file, memory-mapped and read-only; tensors that share
    a storage share memory. The names of nested dicts and lists are joined by dots, and values that are not tensors
    (numbers, strings, None) are left out. `key` selects one entry of the outermost dict.

    The file may be untrusted: nothing in it is executed or imported, and whatever is not a state dict raises
    `InvalidFile` with the reason. So do the files of PyTorch before 1.6, of TorchScript, and of whole modules. A path
    that ends in `.json` is an index (`pytorch_model.bin.index.json`), whose .bin files are read from its own folder.
    Symbolic links may only lead to files inside the file's folder, or inside `within`, such as a download cache.
    """
    path, within = os.fspath(path), os.fspath(within) if within is not None else None
    return _load_index(path, within) if path.endswith(".json") else _load_archive(path, key, within)


def _load_index(path: str, within: str | None) -> dict[str, np.ndarray]:
    weight_map = read_index(path, within, ".bin")
    folder = os.path.dirname(os.path.abspath(path))
    shards: dict[str, dict[str, np.ndarray]] = {}
    for file in sorted(set(weight_map.values())):
        if len(shards) >= MAX_INDEX_FILES:
            raise InvalidFile(f"{path}: it lists more than {MAX_INDEX_FILES:,} files.")
        shards[file] = _load_archive(os.path.join(folder, file), None, within)
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise InvalidFile(f"{path}: it lists {name!r} in {file}, which does not contain it.")
    return {name: shards[file][name] for name, file in weight_map.items()}


def _load_archive(path: str, key: str | None, within: str | None) -> dict[str, np.ndarray]:
    with safe_open(path, within) as (file, size):
        start = file.read(len(_LEGACY))
        if not start.startswith(b"PK\3\4"):
            raise InvalidFile(f"{path}: {_other_format(start)}")
        data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        archive = _open_archive(data, path)
        tree = interpret(archive.pickle(), path, archive.names(), archive.storage, _ADVICE)
        arrays = _flatten(_select(tree, key, path), path)
        if (total := sum(array.nbytes for array in arrays.values())) > MAX_SHARING * size:
            raise InvalidFile(f"{path}: its tensors have {total:,} bytes, which {size:,} bytes of a file do not store.")
        for entry in archive.booleans.values():
            check_booleans(file, data, entry, path)
    return arrays


def _other_format(start: bytes) -> str:
    if start == _LEGACY:
        return f"it has the format of PyTorch before 1.6, a bare pickle; {_ADVICE}."
    return "it does not start like a zip archive, which torch.save writes; for safetensors, use mlax.files.load."


class _Storage(NamedTuple):
    """An array of the file: its bytes `start` to `stop`."""

    dtype: np.dtype
    start: int
    stop: int
    is_typed: bool


class _Archive(NamedTuple):
    """The records of a file, by their names within its one folder, and what its pickle may call."""

    path: str
    data: mmap.mmap
    records: dict[str, Member]
    booleans: dict[int, Entry]  # by start; found while the pickle is interpreted, and checked afterwards

    def pickle(self) -> bytes:
        record = self.records["data.pkl"]
        return self.data[record.start : min(record.stop, record.start + MAX_PICKLE_BYTES + 1)]

    def names(self) -> dict[str, Any]:
        return {
            **dict.fromkeys([*_DTYPES, *_STORAGE_DTYPES]),
            "collections.OrderedDict": _empty_dict,
            "torch.Size": lambda *_: None,
            "torch.device": lambda *_: None,
            "torch._utils._rebuild_tensor": self.tensor,
            "torch._utils._rebuild_tensor_v2": self.tensor,
            "torch._utils._rebuild_tensor_v3": self.tensor_of_dtype,
            "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
            "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
        }

    def storage(self, reference: Any) -> _Storage:
        """The storage of a persistent id: ("storage", its class, its name, its device, its number of elements)."""
        if type(reference) is not tuple:
            raise TypeError
        kind, storage, name, _, count = reference
        if type(kind) is not str or type(storage) is not Name or type(name) is not str or not is_count(count):
            raise TypeError
        dtype, record = _STORAGE_DTYPES[storage.full], self.records.get(f"data/{name}")
        if record is None:
            raise InvalidFile(f"{self.path}: the record data/{name[:100]} of a tensor is missing.")
        size = record.stop - record.start
        if count * dtype.itemsize != size:
            raise InvalidFile(
                f"{self.path}: data/{name[:100]} should have {count:,} elements of {dtype}, but it has {size:,} bytes."
            )
        return _Storage(dtype, record.start, record.stop, "Untyped" not in storage.full)

    def tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> np.ndarray:
        """A tensor of the elements of a storage; `rest` is requires_grad, hooks and flags."""
        if type(storage) is not _Storage or not storage.is_typed:
            raise TypeError
        return self._view(storage, storage.dtype, offset, shape, strides, rest[2:])

    def tensor_of_dtype(
        self, storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *flags: Any
    ) -> np.ndarray:
        """A tensor of a dtype that has no class of storages; its offset counts elements of that dtype."""
        if type(storage) is not _Storage or type(dtype) is not Name:
            raise TypeError
        return self._view(storage, _DTYPES[dtype.full], offset, shape, strides, flags)

    def _view(
        self, storage: _Storage, dtype: np.dtype, offset: Any, shape: Any, strides: Any, flags: tuple[Any, ...]
    ) -> np.ndarray:
        _check_lengths(offset, shape, strides)
        if any(type(flag) is not dict or flag for flag in flags):
            raise InvalidFile(
                f"{self.path}: a tensor is a conjugate or negative view; save its resolve_conj() or resolve_neg()."
            )
        if 0 in shape:
            return np.empty(shape, dtype)
        elements = (storage.stop - storage.start) // dtype.itemsize
        last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        if last >= elements or math.prod(shape) > elements:
            raise InvalidFile(
                f"{self.path}: a tensor of shape {shape} and strides {strides}, starting at {offset}, does not fit "
                f"into its storage of {elements:,} elements; if it is an expanded view, save its contiguous()."
            )
        if dtype == np.bool_:
            self.booleans[storage.start] = Entry(dtype, (elements,), storage.start, storage.start + elements)
        start, steps = storage.start + offset * dtype.itemsize, [stride * dtype.itemsize for stride in strides]
        return np.ndarray(shape, dtype, self.data, start, steps)


def _empty_dict() -> dict[Any, Any]:
    return {}


def _check_lengths(offset: Any, shape: Any, strides: Any) -> None:
    """Refuse anything but short tuples of integers, before they are unpacked."""
    if type(shape) is not tuple or type(strides) is not tuple or not len(shape) == len(strides) <= MAX_AXES:
        raise TypeError
    if not all(map(is_count, (offset, *shape, *strides))) or math.prod(max(1, x) for x in shape) > 2**58:
        raise TypeError


def _open_archive(data: mmap.mmap, path: str) -> _Archive:
    members = read_members(memoryview(data), path)
    folders = [name.partition("/")[0] for name in members if name.partition("/")[2] == "data.pkl"]
    if len(folders) != 1:
        raise InvalidFile(f"{path}: it is a zip archive, but not of torch.save, since it has {len(folders)} data.pkl.")
    start = f"{folders[0]}/"
    records = {name.removeprefix(start): member for name, member in members.items() if name.startswith(start)}
    if "constants.pkl" in records:
        raise InvalidFile(f"{path}: it is a TorchScript program, not a state dict; {_ADVICE}.")
    if not all(record.is_stored for record in records.values()):
        raise InvalidFile(f"{path}: it is compressed or encrypted, which torch.save does not do; {_ADVICE}.")
    order = records.get("byteorder")
    if order and data[order.start : min(order.stop, order.start + 16)] != b"little":
        raise InvalidFile(f"{path}: its byte order is not little-endian; {_ADVICE} on a little-endian machine.")
    return _Archive(path, data, records, {})


def _select(tree: Any, key: str | None, path: str) -> dict[Any, Any]:
    if type(tree) is not dict:
        kind = "tensor" if type(tree) is np.ndarray else type(tree).__name__
        raise InvalidFile(f"{path}: it holds a {kind}, not a dict of tensors; {_ADVICE}.")
    if key is None:
        return tree
    if type(tree.get(key)) is not dict:
        found = ", ".join(repr(name)[:40] for name, value in list(tree.items())[:100] if type(value) is dict)
        raise ValueError(f"files.load_torch: {path} has no dict {key!r}; its dicts are {found or 'none'}.")
    return tree[key]


def _flatten(tree: dict[Any, Any], path: str) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    name_bytes = 0
    for name, array in _named_tensors(tree, path):
        if name in arrays:
            raise InvalidFile(f"{path}: two tensors are named {name[:100]!r}.")
        if reason := name_error(name):
            raise InvalidFile(f"{path}: {name[:100]!r} is not a valid array name: {reason}.")
        name_bytes += len(name)
        if len(arrays) >= MAX_ARRAYS or name_bytes > MAX_NAME_BYTES:
            raise InvalidFile(f"{path}: it has more than {MAX_ARRAYS:,} tensors, or too long names.")
        arrays[name] = array
    return arrays


def _named_tensors(tree: dict[Any, Any], path: str) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors in dicts and lists; a list may contain itself, and a short file may describe 2^32 paths."""
    pending = [("", iter(tree.items()))]
    for _ in range(MAX_VALUES):
        if not pending:
            return
        prefix, items = pending[-1]
        key, value = next(items, (None, None))
        if key is None:
            pending.pop()
        elif type(value) is np.ndarray:
            yield f"{prefix}{key}", value
        elif isinstance(value, dict | list | tuple):
            if len(pending) >= MAX_DEPTH:
                raise InvalidFile(f"{path}: its dicts are nested more than {MAX_DEPTH} levels deep.")
            children = value.items() if isinstance(value, dict) else enumerate(value)
            pending.append((f"{prefix}{key}.", iter(children)))
    raise InvalidFile(f"{path}: it has more than {MAX_VALUES:,} values.")
