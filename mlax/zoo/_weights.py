"""Weights of other libraries: a declared table between leaf paths here and names in a PyTorch state dict."""

import difflib
import fnmatch
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from mlax import files
from mlax.core import (
    DocumentedProtocol,
    Layer,
    Tree,
    Wrapper,
    document_tuple,
    flatten_paths,
    replace_leaves,
    short_repr,
    variable_shapes,
)
from mlax.place import Plan


@document_tuple
class Weight(NamedTuple):
    """A name in a state dict, and the layout of its array there.

    Each `*` of the name is an index into a leading axis of the leaf: "h.*.ln_1.weight" is the stack of h.0.ln_1.weight,
    h.1.ln_1.weight and so on. Of several leaves the array is the concatenation along their last axis. The array there
    without its `unit_axes`, transposed by `axes`, is the leaf.

    >>> zoo.Weight("h.*.mlp.fc.weight", axes=(1, 0))  # the kernels of a stack of Linear layers
    Weight(name='h.*.mlp.fc.weight', axes=(1, 0))
    """

    name: str  # in the state dict, with a * for each leading axis
    axes: tuple[int, ...] | None = None  # the transposition of the array there that gives the leaf; None: none
    unit_axes: tuple[int, ...] = ()  # axes of size 1 of the array there, which the leaf does not have
    start: int = 0  # the index in the name of the first entry of the leaf
    step: int = 1  # from the index in the name of one entry of the leaf to that of the next
    counter: str | None = None  # the name of an int64 that PyTorch keeps beside it: written as 0, and never read

    def from_file(self, array: Any) -> np.ndarray:
        """The leaf, or one index of it, from the array in a state dict."""
        array = np.squeeze(np.asarray(array), self.unit_axes)
        return array.transpose(self.axes) if self.axes else array

    def to_file(self, array: Any) -> np.ndarray:
        """The inverse of `from_file`."""
        array = array.transpose(_inverse(self.axes)) if self.axes else array
        return np.expand_dims(array, self.unit_axes)

    def shape_in_file(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in a state dict of a leaf, or of one index of it."""
        return self.to_file(np.broadcast_to(0, shape)).shape


Entries = Mapping[str | tuple[str, ...], Weight]  # by the path of a leaf, or of several that one array holds


@document_tuple
class WeightMap(NamedTuple):
    """The names and layouts of a model's variables in a PyTorch state dict: a table, read in both directions.

    `map_linear`, `map_conv`, `map_norm`, `map_batch_norm` and `map_embed` are the entries of a layer. A leaf that the
    model does not have, such as the bias of a Linear without one, is left out.
    """

    entries: Entries  # from the path of a leaf, or of several, to a Weight
    prefix: str = ""  # of the names, which files may leave out
    ignored: tuple[str, ...] = ()  # glob patterns of names in files that are not weights
    tied: Mapping[str, str] = {}  # names in files for the same array as another name
    others: Mapping[str, "WeightMap"] = {}  # other maps of the same model, by library: loading takes the one that fits


class WeightMapped(Protocol, metaclass=DocumentedProtocol):
    """A model with weights from elsewhere."""

    def weight_map(self) -> WeightMap:
        """The names of its variables in a state dict."""
        ...

    def example_input(self) -> Any:
        """The `jax.ShapeDtypeStruct` of an input."""
        ...


def map_linear(path: str, module: str) -> dict[Any, Weight]:
    """The entries of a Linear: a kernel, which PyTorch stores transposed, and a bias."""
    return {f"{path}/kernel": Weight(f"{module}.weight", (1, 0)), f"{path}/bias": Weight(f"{module}.bias")}


def map_conv(path: str, module: str) -> dict[Any, Weight]:
    """The entries of a Conv over two axes, channels last: an OHWI kernel, which PyTorch stores as OIHW, and a bias."""
    return {f"{path}/kernel": Weight(f"{module}.weight", (0, 2, 3, 1)), f"{path}/bias": Weight(f"{module}.bias")}


def map_norm(path: str, module: str) -> dict[Any, Weight]:
    """The entries of a LayerNorm, RMSNorm or GroupNorm: scale and shift."""
    return {f"{path}/scale": Weight(f"{module}.weight"), f"{path}/shift": Weight(f"{module}.bias")}


def map_batch_norm(path: str, module: str) -> dict[Any, Weight]:
    """The entries of a BatchNorm: scale and shift, its running mean and variance, and PyTorch's counter of steps."""
    mean, var = Weight(f"{module}.running_mean"), Weight(f"{module}.running_var")
    counter = f"{module}.num_batches_tracked"
    return map_norm(path, module) | {f"{path}/mean": mean, f"{path}/var": var._replace(counter=counter)}


def map_embed(path: str, module: str) -> dict[Any, Weight]:
    """The entry of an Embed or LearnedPositions: its table."""
    return {f"{path}/table": Weight(f"{module}.weight")}


def load_weights(
    model: Layer,
    weights: str | os.PathLike[str] | Mapping[str, Any],
    *,
    dtype: Any = None,
    plan: Plan | None = None,
) -> tuple[Tree, Tree]:
    """The variables of a model, (trainables, non_trainables), from a state dict with names of PyTorch.

    `weights` is a safetensors file, the index of several (`model.safetensors.index.json`), or a dict of arrays. Each
    variable is read, transposed and placed by itself, shard by shard where `plan` says so, in its dtype in the file
    unless `dtype` is given. Missing, extra and misshapen entries are one error that lists them all.

    >>> model = zoo.GPT2(vocabulary=50, positions=16, width=8, depth=2, heads=2)
    >>> trainables, _ = model.init(jax.random.key(0), model.example_input())
    >>> trainables, _ = zoo.load_weights(model, zoo.state_dict(model, trainables))
    """
    arrays = _read_arrays(weights)
    described = _described(model)
    x = described.example_input()
    shapes = variable_shapes(model, x)
    leaves = {path: leaf for tree in shapes for path, leaf in flatten_paths(tree).items()}
    weight_map = described.weight_map()
    tables = [_resolve(each, leaves, arrays) for each in (weight_map, *weight_map.others.values())]
    table = min(tables, key=lambda table: sum(source.name not in arrays for source in table.sources))
    _check(model, table, arrays)
    shardings = _shardings(model, x, plan, leaves)
    loaded = {path: _place(leaf, dtype, shardings[path], table.readers[path]) for path, leaf in leaves.items()}
    return tuple(replace_leaves(tree, loaded) for tree in shapes)  # pyright: ignore[reportReturnType]


def state_dict(
    model: Layer, trainables: Tree, non_trainables: Tree = None, *, names: str | None = None
) -> dict[str, np.ndarray]:
    """The inverse of `load_weights`: PyTorch's state dict as NumPy arrays.

    `names` is the library, of several that the model's weight map has; None: the first.

    In PyTorch, `module.load_state_dict({name: torch.from_numpy(array) for name, array in zoo.state_dict(...).items()})`
    loads it.
    """
    weight_map = _choose(model, names)
    leaves = {**flatten_paths(trainables), **flatten_paths(non_trainables)}
    state: dict[str, np.ndarray] = {}
    for paths, weight in _present(weight_map.entries, leaves):
        for index in _indices(weight, leaves[paths[0]]):
            parts = [np.asarray(leaves[path][index]) for path in paths]
            array = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
            state[_fill(weight.name, weight, index)] = weight.to_file(array)
            if weight.counter is not None:
                state[_fill(weight.counter, weight, index)] = np.zeros((), np.int64)
    return state | {name: state[other] for name, other in weight_map.tied.items() if other in state}


class _Reader(NamedTuple):
    """Reads a leaf, one index of its leading axes at a time."""

    arrays: Mapping[str, Any]  # the state dict
    weight: Weight
    columns: slice | None  # of the last axis; None: all

    @property
    def stars(self) -> int:
        """The number of leading axes."""
        return self.weight.name.count("*")

    def read(self, index: tuple[int, ...]) -> np.ndarray:
        array = self.weight.from_file(self.arrays[_fill(self.weight.name, self.weight, index)])
        return array if self.columns is None else array[..., self.columns]


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


def _described(model: Layer) -> WeightMapped:
    """The model inside of wrappers that keep the paths of its variables."""
    layer = model
    while isinstance(layer, Wrapper) and not layer.has_stack:
        layer = layer.layer
    described: Any = layer
    if not hasattr(layer, "weight_map") or not hasattr(layer, "example_input"):
        raise TypeError(
            f"{short_repr(model)} has no weight map; write its methods weight_map(), which returns a zoo.WeightMap, "
            "and example_input(), or convert its weights by nn.from_torch."
        )
    return described


def _choose(model: Layer, names: str | None) -> WeightMap:
    """The weight map with the names of a library."""
    weight_map = _described(model).weight_map()
    if names is None:
        return weight_map
    if names not in weight_map.others:
        others = ", ".join(map(repr, weight_map.others)) or "no other names"
        raise ValueError(f"{short_repr(model)}: names is {names!r}, but the weight map has {others} besides None.")
    return weight_map.others[names]


def _read_arrays(weights: Any) -> dict[str, Any]:
    if isinstance(weights, Mapping):
        return dict(weights)
    return flatten_paths(files.load(weights))


def _present(entries: Entries, leaves: Mapping[str, Any]) -> Iterator[tuple[list[str], Weight]]:
    """The entries whose leaves the model has."""
    for key, weight in entries.items():
        paths = [key] if isinstance(key, str) else list(key)
        if any(path in leaves for path in paths):
            yield paths, weight


def _resolve(weight_map: WeightMap, leaves: Mapping[str, Any], arrays: Mapping[str, Any]) -> _Table:
    """The table with indices in place of stars, and without a prefix that the state dict leaves out."""
    has_prefix = any(name.startswith(weight_map.prefix) for name in arrays)

    def to_file(name: str) -> str:
        return name if has_prefix else name.removeprefix(weight_map.prefix)

    sources: list[_Source] = []
    readers: dict[str, _Reader] = {}
    ignored = list(weight_map.ignored)
    for paths, weight in _present(weight_map.entries, leaves):
        stars = weight.name.count("*")
        shapes = [leaves[path].shape[stars:] for path in paths]
        shape = (*shapes[0][:-1], sum(each[-1] for each in shapes)) if len(paths) > 1 else shapes[0]
        names = (to_file(_fill(weight.name, weight, index)) for index in _indices(weight, leaves[paths[0]]))
        sources.extend(_Source(name, weight.shape_in_file(shape)) for name in names)
        ignored.extend([weight.counter] if weight.counter else ())
        starts = itertools.accumulate((each[-1] for each in shapes), initial=0) if len(paths) > 1 else [None]
        for path, start, each in zip(paths, starts, shapes, strict=False):
            columns = None if start is None else slice(start, start + each[-1])
            readers[path] = _Reader(arrays, weight._replace(name=to_file(weight.name)), columns)
    unmapped = tuple(path for path in leaves if path not in readers)
    tied = {to_file(name): to_file(other) for name, other in weight_map.tied.items()}
    return _Table(tuple(sources), readers, unmapped, tuple(map(to_file, ignored)), tied)


def _check(model: Layer, table: _Table, arrays: Mapping[str, Any]) -> None:
    """Raise one error that lists everything in which the state dict differs from the model."""
    if table.unmapped:
        raise ValueError(f"{short_repr(model)}: its weight map has no entry for {_few(table.unmapped)}.")
    names = {source.name for source in table.sources}
    missing = [source.name for source in table.sources if source.name not in arrays]
    misshapen = [
        f"{source.name} {tuple(np.shape(arrays[source.name]))}, not {source.shape}"
        for source in table.sources
        if source.name in arrays and tuple(np.shape(arrays[source.name])) != source.shape
    ]
    extra = [
        name
        for name in arrays
        if name not in names
        and name not in table.tied
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in table.ignored)
    ]
    untied = [
        f"{name}, not equal to {other}"
        for name, other in table.tied.items()
        if name in arrays and other in arrays and not _equal(arrays[name], arrays[other])
    ]
    faults = {"missing": [_suggest(name, extra) for name in missing], "extra": extra, "misshapen": misshapen}
    lines = [f"  {kind}: {_few(found)}" for kind, found in {**faults, "not tied": untied}.items() if found]
    if lines:
        raise ValueError("\n".join([f"{short_repr(model)}: the weights are not those of this model:", *lines]))


def _suggest(name: str, extra: list[str]) -> str:
    close = difflib.get_close_matches(name, extra[:500], n=1, cutoff=0.8)
    return f"{name} (is it {close[0]}?)" if close else name


def _few(names: Any, number: int = 12) -> str:
    names = list(names)
    more = f" and {len(names) - number} more" if len(names) > number else ""
    return ", ".join(names[:number]) + more


def _equal(a: Any, b: Any) -> bool:
    return np.shape(a) == np.shape(b) and np.array_equal(np.asarray(a), np.asarray(b))


def _shardings(model: Layer, x: Any, plan: Plan | None, leaves: Mapping[str, Any]) -> dict[str, Sharding]:
    if plan is not None:
        return {path: leaf for tree in plan.variable_shardings(model, x) for path, leaf in flatten_paths(tree).items()}
    return dict.fromkeys(leaves, jnp.zeros(()).sharding)  # of the default device


def _place(leaf: Any, dtype: Any, sharding: Sharding, reader: _Reader) -> jax.Array:
    """A leaf, of which each device reads its shard alone."""
    stars = reader.stars
    first = reader.read((0,) * stars)
    target = np.dtype(dtype) if dtype is not None and np.issubdtype(leaf.dtype, np.inexact) else first.dtype

    def read_shard(shard: Any) -> np.ndarray:
        bounds = [range(*part.indices(size)) for part, size in zip(shard, leaf.shape, strict=True)]
        out = np.empty([len(each) for each in bounds], target)
        leading = bounds[:stars]
        for place in itertools.product(*(range(len(each)) for each in leading)):
            index = tuple(each[at] for each, at in zip(leading, place, strict=True))
            out[place] = reader.read(index)[shard[stars:]]
        return out

    return jax.make_array_from_callback(leaf.shape, sharding, read_shard, dtype=target)


def _indices(weight: Weight, leaf: Any) -> Iterator[tuple[int, ...]]:
    """The indices of the leading axes that the stars of the name stand for."""
    return itertools.product(*map(range, leaf.shape[: weight.name.count("*")]))


def _fill(name: str, weight: Weight, index: tuple[int, ...]) -> str:
    """The name with an index in place of each star, the first of which counts by the weight's start and step."""
    first = [weight.start + weight.step * each for each in index[:1]]
    pieces, numbers = name.split("*"), map(str, (*first, *index[1:]))
    return "".join(itertools.chain(*zip(pieces, (*numbers, ""), strict=True)))


def _inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axes.index(axis) for axis in range(len(axes)))
