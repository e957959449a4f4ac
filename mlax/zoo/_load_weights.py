"""load_weights: the variables of a model from a PyTorch state dict, each read, transposed and placed by itself."""

import difflib
import fnmatch
import heapq
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from mlax import files
from mlax.core import (
    Layer,
    Repeat,
    Tree,
    all_layers,
    flatten_paths,
    override,
    replace_leaves,
    short_repr,
    variable_shapes,
    with_fields,
)
from mlax.place import Plan
from mlax.zoo._weights import (
    Weight,
    WeightMap,
    check_unique,
    concatenated_shape,
    find_described,
    read_weight_map,
)

_COMPARED_BYTES = 1 << 24  # at a time
_SHARED_BYTES = 1 << 25  # by tensors of a file, besides a fifth of it
_ADVICE_DISABLED = "pass dtype='float32', or enable jax_enable_x64"
_TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".bin.index.json")


def load_weights(
    model: Layer,
    weights: str | os.PathLike[str] | Mapping[str, Any],
    *,
    dtype: Any = None,
    plan: Plan | None = None,
    within: str | os.PathLike[str] | None = None,
) -> tuple[Tree, Tree]:
    """The variables of a model, (trainables, non_trainables), from a state dict with names of PyTorch.

    `weights` is a safetensors file, a PyTorch file (.bin, .pt, .pth), the index of several
    (`model.safetensors.index.json`), or a dict of arrays. Each variable is read, transposed and placed by itself, shard
    by shard where `plan` says so, in its dtype in the file unless `dtype` is given. Missing, extra and misshapen
    entries are one error that lists them all. The files may be untrusted; `within`: as in `files.load`.

    >>> model = zoo.GPT2(vocabulary=50, positions=16, width=8, depth=2, heads=2)
    >>> trainables, _ = model.init(jax.random.key(0), model.example_input())
    >>> trainables, _ = zoo.load_weights(model, zoo.state_dict(model, trainables))
    """
    described = find_described(model)
    dtype = _floating_dtype(dtype)
    arrays = read_arrays(weights, within)
    weight_map = read_weight_map(model)
    _check_number(model, len(weight_map.entries) // 2, arrays)  # before tracing a model that may be huge
    x = described.example_input()
    shapes = variable_shapes(_scan_stacks(model), x)
    leaves = {path: leaf for tree in shapes for path, leaf in flatten_paths(tree).items()}
    table = _choose_table(model, weight_map, leaves, arrays, weights)
    _check_entries(model, table, leaves, arrays, dtype, weights)
    _check_sharing(table, arrays, weights)
    shardings = _shardings(model, x, plan, leaves)
    loaded = {path: _load_leaf(leaf, table.readers[path], dtype, shardings[path]) for path, leaf in leaves.items()}
    return tuple(replace_leaves(tree, loaded) for tree in shapes)  # pyright: ignore[reportReturnType]


def read_arrays(weights: Any, within: Any) -> dict[str, Any]:
    """A state dict, memory-mapped if it is a file."""
    if isinstance(weights, Mapping):
        return {name: _as_array(name, value) for name, value in weights.items()}
    if os.fspath(weights).endswith(_TORCH_SUFFIXES):
        return dict(files.load_torch(weights, within=within))
    return flatten_paths(files.load(weights, within=within))


def _as_array(name: Any, value: Any) -> Any:
    if isinstance(value, np.ndarray | jax.Array):
        return value
    try:
        return np.asarray(value)
    except (TypeError, RuntimeError) as error:  # of a torch.Tensor in bfloat16, or one that requires a gradient
        raise TypeError(
            f"load_weights: the entry {name!r} is a {type(value).__name__}, which NumPy cannot read ({error}); write "
            "the state dict by torch.save, and pass the path."
        ) from None


def _floating_dtype(dtype: Any) -> np.dtype | None:
    if dtype is None:
        return None
    try:
        target = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(
            f"load_weights: dtype is {dtype!r}, but must be 'float32', 'bfloat16', 'float16' or another floating dtype "
            "of JAX."
        ) from None
    if not jnp.issubdtype(target, jnp.inexact):
        raise TypeError(f"load_weights: dtype is {target}, but must be a floating dtype; to quantize, use nn.quantize.")
    if jax.dtypes.canonicalize_dtype(target) != target:
        raise ValueError(f"load_weights: dtype is {target}, which JAX disables; {_ADVICE_DISABLED}.")
    return target


def _scan_stacks(model: Layer) -> Layer:
    """The model with the same variables that traces each layer of a Repeat once, however many there are."""
    has_stacks = any(isinstance(layer, Repeat) for layer in all_layers(model))
    return override(model, Repeat, mode="scan") if has_stacks else model


def _check_number(model: Layer, number: int, arrays: Mapping[str, Any]) -> None:
    if number > 8 * len(arrays) + 1000:
        raise ValueError(f"{short_repr(model)}: it has {number:,} weights, but there are {len(arrays):,} arrays.")


class _Reader(NamedTuple):
    """Reads a leaf, one index of its leading axes at a time."""

    arrays: Mapping[str, Any]  # the state dict
    weight: Weight
    columns: slice | None  # of the last axis; None: all

    def array(self, index: tuple[int, ...]) -> Any:
        return self.arrays[self.weight.fill(index)]

    def read(self, index: tuple[int, ...]) -> np.ndarray:
        array = self.weight.from_file(self.array(index))
        return array if self.columns is None else array[..., self.columns]

    def read_shard(self, shape: tuple[int, ...], shard: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        bounds = [range(*part.indices(size)) for part, size in zip(shard, shape, strict=True)]
        out = np.empty([len(each) for each in bounds], dtype)
        leading = bounds[: self.weight.stars]
        for place in itertools.product(*(range(len(each)) for each in leading)):
            index = tuple(each[at] for each, at in zip(leading, place, strict=True))
            out[place] = self.read(index)[shard[self.weight.stars :]]
            files.release_pages(self.array(index))
        return out


class _Source(NamedTuple):
    """An array of a state dict, and its shape there."""

    name: str
    shape: tuple[int, ...]


class _Table(NamedTuple):
    """A weight map for one model and one state dict."""

    sources: tuple[_Source, ...]
    readers: dict[str, _Reader]  # by path
    unmapped: tuple[str, ...]  # paths of leaves that the map does not have
    ignored: tuple[str, ...]  # patterns
    tied: dict[str, str]
    prefix: str  # that the map's names have, but not those here


def _choose_table(
    model: Layer, weight_map: WeightMap, leaves: Mapping[str, Any], arrays: Mapping[str, Any], weights: Any
) -> _Table:
    """The table of the library that the state dict has most names of; raises if it has them behind a prefix."""
    tables = []
    for each in (weight_map, *weight_map.others.values()):
        number = sum(math.prod(leaves[paths[0]].shape[: weight.stars]) for paths, weight in each.present(leaves))
        _check_number(model, number, arrays)
        tables.append(_resolve(each, leaves, arrays))
    best = max(tables, key=lambda table: _count_names(table, arrays))
    if 2 * _count_names(best, arrays) < len(best.sources):
        _check_prefix(model, tables, arrays, weights)
    return best


def _count_names(table: _Table, arrays: Mapping[str, Any], prefix: str = "") -> int:
    return sum(prefix + source.name in arrays for source in table.sources)


def _check_prefix(model: Layer, tables: list[_Table], arrays: Mapping[str, Any], weights: Any) -> None:
    """Raise if the state dict has most names of a table, with something before each, such as "module."."""
    for table in tables:
        for source in table.sources[:3]:
            found = (name.removesuffix(source.name) for name in arrays if name.endswith(f".{source.name}"))
            for prefix in itertools.islice((each for each in found if len(each) < 100), 4):
                if 2 * _count_names(table, arrays, prefix) > len(table.sources):
                    raise ValueError(_prefix_error(model, prefix.removesuffix(table.prefix), arrays, weights))


def _prefix_error(model: Layer, prefix: str, arrays: Mapping[str, Any], weights: Any) -> str:
    is_common = all(name.startswith(prefix) for name in arrays)
    condition = "" if is_common else f" if name.startswith({prefix!r})"
    advice = f"{{name.removeprefix({prefix!r}): array for name, array in state.items(){condition}}}"
    if not isinstance(weights, Mapping) and os.fspath(weights).endswith(_TORCH_SUFFIXES):
        call, key = f"files.load_torch({os.fspath(weights)!r}", prefix.split(".")[0]
        advice += f", where state is {call}), or {call}, key={key!r}) if they are one entry of a larger dict"
    quantity = "all" if is_common else "the"
    return (
        f"{short_repr(model)}: {quantity} names of the weights{_where(weights)} start with {prefix!r}; pass {advice}."
    )


def _resolve(weight_map: WeightMap, leaves: Mapping[str, Any], arrays: Mapping[str, Any]) -> _Table:
    """The table with indices in place of stars, and without a prefix that the state dict leaves out."""
    has_prefix = any(name.startswith(weight_map.prefix) for name in arrays)

    def to_file(name: str) -> str:
        return name if has_prefix else name.removeprefix(weight_map.prefix)

    sources: list[_Source] = []
    readers: dict[str, _Reader] = {}
    owners: dict[str, str] = {}
    ignored = list(weight_map.ignored)
    for paths, weight in weight_map.present(leaves):
        shapes = [leaves[path].shape[weight.stars :] for path in paths]
        in_file = weight.shape_in_file(concatenated_shape(shapes))
        for index in weight.indices(leaves[paths[0]]):
            sources.append(_Source(to_file(weight.fill(index)), in_file))
            check_unique(owners, sources[-1].name, paths[0])
        ignored.extend([weight.counter] if weight.counter else ())
        starts = itertools.accumulate((each[-1] for each in shapes), initial=0) if len(paths) > 1 else [None]
        for path, start, each in zip(paths, starts, shapes, strict=False):
            columns = None if start is None else slice(start, start + each[-1])
            readers[path] = _Reader(arrays, weight._replace(name=to_file(weight.name)), columns)
    unmapped = tuple(path for path in leaves if path not in readers)
    tied = {to_file(name): to_file(other) for name, other in weight_map.tied.items()}
    left_out = "" if has_prefix else weight_map.prefix
    return _Table(tuple(sources), readers, unmapped, tuple(map(to_file, ignored)), tied, left_out)


def _check_entries(
    model: Layer, table: _Table, leaves: Mapping[str, Any], arrays: Mapping[str, Any], dtype: Any, weights: Any
) -> None:
    """Raise one error that lists everything in which the state dict differs from the model."""
    if table.unmapped:
        raise ValueError(f"{short_repr(model)}: its weight map has no entry for {_few(table.unmapped)}.")
    missing = [source.name for source in table.sources if source.name not in arrays]
    found = [source for source in table.sources if source.name in arrays]
    extra = list(_extra_names(table, arrays))
    faults = {
        "missing": [_suggest(name, extra) if at < 12 else name for at, name in enumerate(missing)],
        "extra": extra,
        "misshapen": [
            f"{name} {arrays[name].shape}, not {shape}" for name, shape in found if tuple(arrays[name].shape) != shape
        ],
        **({} if missing else _dtype_faults(table, leaves, arrays, dtype)),
        "not tied": [
            f"{name}, not equal to {other}"
            for name, other in table.tied.items()
            if name in arrays and other in arrays and not is_equal(arrays[name], arrays[other])
        ],
    }
    lines = [f"  {kind}: {_few(names)}" for kind, names in faults.items() if names]
    if lines:
        title = f"{short_repr(model)}: the weights{_where(weights)} are not those of this model:"
        raise ValueError("\n".join([title, *lines, *_head_advice(model, found, arrays)]))


def _where(weights: Any) -> str:
    return "" if isinstance(weights, Mapping) else f" in {os.fspath(weights)}"


def _head_advice(model: Layer, found: list[_Source], arrays: Mapping[str, Any]) -> Iterator[str]:
    """What to do about a head with another number of classes."""
    described: Any = find_described(model)
    classes = getattr(described, "classes", None)
    for name, shape in found:
        there = tuple(arrays[name].shape)
        if classes is not None and shape[:1] == (classes,) != there[:1] and shape[1:] == there[1:]:
            headless = " (or with classes=None, which has no head)" if _may_be_headless(described) else ""
            yield f"The head has {there[0]} classes there: load it with classes={there[0]}{headless}, then replace it."
            return


def _may_be_headless(described: Any) -> bool:
    try:
        with_fields(described, classes=None)
    except (TypeError, ValueError):
        return False
    return True


def _check_sharing(table: _Table, arrays: Mapping[str, Any], weights: Any) -> None:
    """Refuse a PyTorch file whose tensors share storages so often that it would become far larger in memory."""
    if isinstance(weights, Mapping):
        return
    used = [arrays[source.name] for source in table.sources]
    stored = end = 0
    for start, stop in sorted(np.lib.array_utils.byte_bounds(array) for array in used if array.size):
        stored, end = stored + max(0, stop - max(start, end)), max(end, stop)
    if (total := sum(array.nbytes for array in used)) > 1.2 * stored + _SHARED_BYTES:
        raise files.InvalidFile(
            f"{os.fspath(weights)}: its tensors have {total:,} bytes but share {stored:,}; load them by "
            "files.load_torch, and pass the dict if you trust it."
        )


def _extra_names(table: _Table, arrays: Mapping[str, Any]) -> Iterator[str]:
    known = {source.name for source in table.sources} | table.tied.keys()
    for name in arrays:
        if name not in known and not any(fnmatch.fnmatchcase(name, pattern) for pattern in table.ignored):
            yield name


def _dtype_faults(
    table: _Table, leaves: Mapping[str, Any], arrays: Mapping[str, Any], dtype: Any
) -> dict[str, list[str]]:
    """What cannot be loaded without a cast that nobody asked for."""
    other, mixed, disabled = [], [], []
    for path, reader in table.readers.items():
        names = [reader.weight.fill(index) for index in reader.weight.indices(leaves[path])]
        found = {np.dtype(arrays[name].dtype) for name in names}
        is_floating = jnp.issubdtype(leaves[path].dtype, jnp.inexact)
        if any(jnp.issubdtype(each, jnp.inexact) != is_floating for each in found):
            other.append(f"{names[0]} {_few(map(str, found))}, not like {leaves[path].dtype}")
        elif dtype is None and len(found) > 1:
            mixed.append(f"{names[0]} and others of {path}: {_few(sorted(map(str, found)))}")
        elif dtype is None and any(jax.dtypes.canonicalize_dtype(each) != each for each in found):
            disabled.append(f"{names[0]} {_few(map(str, found))}")
    return {
        "of another dtype": other,
        "of several dtypes (pass dtype=)": mixed,
        f"of a dtype that JAX disables ({_ADVICE_DISABLED})": disabled,
    }


def _suggest(name: str, extra: list[str]) -> str:
    """The name with the most similar one; difflib is slow, so it sees a few with the most parts in common."""
    parts = set(name.split("."))
    closest = heapq.nlargest(3, extra[:2000], key=lambda other: len(parts.intersection(other[:200].split("."))))
    close = difflib.get_close_matches(name, [other for other in closest if len(other) < 200], n=1, cutoff=0.8)
    return f"{name} (is it {close[0]}?)" if close else name


def _few(names: Any, number: int = 12) -> str:
    names = list(names)
    more = f" and {len(names) - number} more" if len(names) > number else ""
    return ", ".join(name if len(name) < 200 else f"{name[:197]}..." for name in names[:number]) + more


def is_equal(a: Any, b: Any) -> bool:
    """Whether two arrays are bitwise equal, compared in pieces, whose pages are then released."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (np.atleast_1d(np.asarray(each)) for each in (a, b))
    if a.__array_interface__ == b.__array_interface__:
        return True
    rows = max(1, _COMPARED_BYTES * len(a) // max(1, a.nbytes))
    for start in range(0, len(a), rows):
        pieces = [each[start : start + rows] for each in (a, b)]
        if pieces[0].tobytes() != pieces[1].tobytes():
            return False
        for piece in pieces:
            files.release_pages(piece)
    return True


def _shardings(model: Layer, x: Any, plan: Plan | None, leaves: Mapping[str, Any]) -> dict[str, Any]:
    if plan is None:
        return dict.fromkeys(leaves)
    return {path: leaf for tree in plan.variable_shardings(model, x) for path, leaf in flatten_paths(tree).items()}


def _load_leaf(leaf: Any, reader: _Reader, dtype: np.dtype | None, sharding: Sharding | None) -> jax.Array:
    """A leaf, of which each device gets its shard alone."""
    target = np.dtype(reader.array((0,) * reader.weight.stars).dtype)
    if dtype is not None and jnp.issubdtype(leaf.dtype, jnp.inexact):
        target = dtype
    if sharding is not None:
        return _load_shards(leaf.shape, reader, target, sharding)
    _drop_host_buffers()
    return jax.block_until_ready(jax.device_put(reader.read_shard(leaf.shape, (slice(None),) * leaf.ndim, target)))


def _load_shards(shape: tuple[int, ...], reader: _Reader, dtype: np.dtype, sharding: Sharding) -> jax.Array:
    """One shard after another, so that the host holds one at a time beside those that are placed on it."""
    placed: dict[Any, jax.Array] = {}
    groups: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}
    for device, shard in sharding.addressable_devices_indices_map(shape).items():
        shard = shard or ()
        groups.setdefault(tuple((part.start, part.stop) for part in shard), (shard, []))[1].append(device)
    for shard, devices in groups.values():
        host = None
        _drop_host_buffers()
        host = reader.read_shard(shape, shard, dtype)
        for device in devices:
            target = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            placed[device] = jax.block_until_ready(jax.device_put(host, target))
    return jax.make_array_from_single_device_arrays(shape, sharding, list(placed.values()))


def _drop_host_buffers() -> None:
    """Let JAX drop the NumPy arrays of transfers that are done, which it does when the next one starts."""
    jax.device_put(np.zeros((), np.int8))
