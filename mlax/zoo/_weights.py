"""Weights of other libraries: a declared table between leaf paths here and names in a PyTorch state dict."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from mlax.core import DocumentedProtocol, Layer, Wrapper, document_tuple, short_repr


@document_tuple
class Weight(NamedTuple):
    """A name in a state dict, and the layout of its array there.

    Each `*` of the name is an index into a leading axis of the leaf: "h.*.ln_1.weight" is the stack of h.0.ln_1.weight,
    h.1.ln_1.weight and so on. Of several leaves the array is the concatenation along their last axis. The array there
    without its `unit_axes`, transposed by `axes`, is the leaf.

    >>> weight = zoo.Weight("h.*.mlp.fc.weight", axes=(1, 0))  # the kernels of a stack of Linear layers
    >>> weight.fill((3,))
    'h.3.mlp.fc.weight'
    """

    name: str  # in the state dict, with a * for each leading axis
    axes: tuple[int, ...] | None = None  # the transposition of the array there that gives the leaf; None: none
    unit_axes: tuple[int, ...] = ()  # axes of size 1 of the array there, which the leaf does not have
    start: int = 0  # the index in the name of the first entry of the leaf
    step: int = 1  # from the index in the name of one entry of the leaf to that of the next
    counter: str | None = None  # the name of an int64 that PyTorch keeps beside it: written as 0, and never read

    @property
    def stars(self) -> int:
        """The number of leading axes that the name has indices for."""
        return self.name.count("*")

    def indices(self, leaf: Any) -> Iterator[tuple[int, ...]]:
        """The indices of the leading axes of a leaf."""
        return itertools.product(*map(range, leaf.shape[: self.stars]))

    def fill(self, index: tuple[int, ...], name: str | None = None) -> str:
        """The name, or another like it, with an index in place of each star; the first counts by `start` and `step`."""
        numbers = map(str, (*(self.start + self.step * each for each in index[:1]), *index[1:]))
        return "".join(itertools.chain(*zip((name or self.name).split("*"), (*numbers, ""), strict=True)))

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

    def present(self, leaves: Mapping[str, Any]) -> Iterator[tuple[list[str], Weight]]:
        """The entries whose leaves a model has; raises if one does not fit its leaves."""
        for key, weight in self.entries.items():
            paths = [key] if isinstance(key, str) else list(key)
            if any(path in leaves for path in paths):
                _check_entry(paths, weight, leaves)
                yield paths, weight


class WeightMapped(Protocol, metaclass=DocumentedProtocol):
    """A model with weights from elsewhere."""

    def weight_map(self) -> WeightMap:
        """The names of its variables in a state dict."""
        ...

    def example_input(self) -> Any:
        """The `jax.ShapeDtypeStruct` of an input."""
        ...


def find_described(model: Layer) -> WeightMapped:
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


def read_weight_map(model: Layer) -> WeightMap:
    """The weight map of a model."""
    weight_map: Any = find_described(model).weight_map()
    if not isinstance(weight_map, WeightMap):
        raise TypeError(
            f"{short_repr(model)}: weight_map() returns a {type(weight_map).__name__}, but must return a "
            "zoo.WeightMap; for a dict of entries, zoo.WeightMap(entries)."
        )
    return weight_map


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


def check_unique(owners: dict[str, str], name: str, path: str) -> None:
    """Add the path of a leaf to those by name, and raise if the name is there already."""
    if name in owners:
        shared = f"{owners[name]} and {path} the same" if owners[name] != path else f"{path} two entries of one"
        raise ValueError(
            f"the weight map gives {shared} name, {name!r}; each leaf needs a name, and further "
            "names of one array are WeightMap's `tied`."
        )
    owners[name] = path


def concatenated_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of arrays that are concatenated along their last axis."""
    return shapes[0] if len(shapes) == 1 else (*shapes[0][:-1], sum(shape[-1] for shape in shapes))


def _check_entry(paths: list[str], weight: Any, leaves: Mapping[str, Any]) -> None:
    """Raise unless the leaves can have the layout that an entry declares."""
    entry = f"the weight map's entry {', '.join(map(repr, paths))}"
    if not isinstance(weight, Weight):
        raise TypeError(f"{entry} is a {type(weight).__name__}, but must be a zoo.Weight, such as Weight('fc.weight').")
    if absent := [path for path in paths if path not in leaves]:
        raise ValueError(f"{entry} joins several leaves, but the model has no {', '.join(absent)}.")
    shapes = [tuple(leaves[path].shape) for path in paths]
    rank = len(shapes[0]) - weight.stars
    try:
        if rank < (len(paths) > 1) or any(len(shape) != len(shapes[0]) for shape in shapes):
            raise ValueError
        weight.shape_in_file(concatenated_shape([shape[weight.stars :] for shape in shapes]))
    except (ValueError, IndexError):
        raise ValueError(
            f"{entry}, {weight.name!r} with axes={weight.axes} and unit_axes={weight.unit_axes}, does not fit the leaf "
            f"of shape {', '.join(map(str, shapes))}: each * of the name ({weight.stars} here) takes one leading axis, "
            f"as of a stack of layers, and axes is an order of the other {max(rank, 0)}."
        ) from None


def _inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axes.index(axis) for axis in range(len(axes)))
