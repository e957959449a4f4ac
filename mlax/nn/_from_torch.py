"""from_torch, to_torch: the variables of a model from PyTorch's state dict, and back."""

import collections
import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mlax.core import (
    Composite,
    Layer,
    Map,
    Recurrent,
    Repeat,
    Series,
    Tied,
    Tree,
    Wrapper,
    find_layers,
    flatten_paths,
    no_match_message,
    part_inputs,
    parts_of,
    short_repr,
    unflatten_paths,
    untie,
    variable_shapes,
)
from mlax.nn._attention import MultiHeadAttention
from mlax.nn._conv import Conv, ConvTranspose
from mlax.nn._embed import Embed, EmbedBag
from mlax.nn._linear import MLP, Linear, PReLU
from mlax.nn._lora import LoRA
from mlax.nn._norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from mlax.nn._positions import LearnedPositions
from mlax.nn._recurrent import GRUCell, LSTMCell, RNNCell
from mlax.nn._recurrent_layers import Bidirectional, Stacked
from mlax.ops import parse_layout

Arrays = list[np.ndarray]
COUNTER = "num_batches_tracked"  # of PyTorch's BatchNorm, for a momentum of None


def from_torch(
    model: Layer, state_dict: Mapping[str, Any], x: Any, *, names: Mapping[str, str] | None = None
) -> tuple[Tree, Tree]:
    """The variables of `model` for inputs like `x`, (trainables, non_trainables), from PyTorch's state dict.

        state = {name: tensor.numpy() for name, tensor in torch_model.state_dict().items()}
        trainables, non_trainables = nn.from_torch(model, state, x)

    A part is looked up under its own name: `blocks/norm` is the module blocks.norm, the layers of a `Repeat` are
    blocks.0, blocks.1 and so on, and the unnamed parts of a `Series` are numbered like those of nn.Sequential. Where
    the modules are called otherwise, `names` says how: by the path of the part, the name within the module that holds
    it, such as {"encode": "encoder", "encode/attend": "self_attn"}, or "" for that module itself. The layers of a
    `Repeat` share the part `stacked`: for the modules h.0.attn, h.1.attn and so on, the layers of
    `Repeat(block, 12)` at `blocks`, pass {"blocks": "h", "blocks/stacked/attend": "attn"}.

    | here | in PyTorch |
    |---|---|
    | Linear, MLP, Conv, ConvTranspose: kernel, bias | weight, bias: transposed, in any layout and number of groups |
    | Embed, EmbedBag, LearnedPositions: table; PReLU: slope | weight |
    | LayerNorm, RMSNorm, GroupNorm, InstanceNorm: scale, shift | weight, bias |
    | BatchNorm: scale, shift, mean, var | weight, bias, running_mean, running_var |
    | MultiHeadAttention: query, key, value, out | in_proj_weight or q_proj_weight and so on, out_proj |
    | Recurrent, Bidirectional, Stacked of RNN, GRU and LSTM cells | weight_ih_l0, weight_hh_l0_reverse and so on |

    A missing name, one that is left over and a wrong shape or dtype are errors.
    """
    if isinstance(state_dict, str | os.PathLike):
        raise TypeError(
            f"from_torch: the state dict is the path {os.fspath(state_dict)!r}; load the file first, by "
            "mlax.files.load (.safetensors), mlax.files.load_torch (.pt, .pth, .bin) or np.load (.npz)."
        )
    shapes = _all_shapes(model, x)
    found: dict[str, dict[tuple[int, ...], np.ndarray]] = collections.defaultdict(dict)
    rules = _all_rules(model, x, names or {}, shapes)
    used = {name for rule in rules for name in rule.names}
    for rule in rules:
        arrays = [_look_up(state_dict, name, rule.leaves[0], used) for name in rule.names]
        for leaf, array in zip(rule.leaves, rule.to_mlax(arrays), strict=True):
            found[leaf][rule.index] = _fit(rule, leaf, array, shapes[leaf])
    extra = [name for name in state_dict if name not in used and name.rpartition(".")[2] != COUNTER]
    if extra:
        raise ValueError(f"from_torch: the model has no place for {_few(extra)}; leave them out, or add the parts.")
    leaves = {path: jnp.asarray(_stack(arrays)) for path, arrays in found.items()}
    wanted = variable_shapes(model, x)
    return tuple(_pick(tree, leaves) for tree in wanted)  # pyright: ignore[reportReturnType]


def to_torch(
    model: Layer, trainables: Tree, non_trainables: Tree, x: Any, *, names: Mapping[str, str] | None = None
) -> dict[str, np.ndarray]:
    """The inverse of `from_torch`: PyTorch's state dict, as NumPy arrays, for inputs like `x`.

    Where PyTorch adds two biases, in RNN and LSTM, the second is zero, unless the cell has it as `recurrent_bias`.
    """
    leaves = {**flatten_paths(untie(model, trainables)), **flatten_paths(non_trainables)}
    state: dict[str, np.ndarray] = {}
    for rule in _all_rules(model, x, names or {}, _all_shapes(model, x)):
        arrays = [np.asarray(leaves[leaf])[rule.index] for leaf in rule.leaves]
        state.update(zip(rule.names, rule.to_torch(arrays), strict=True))
        if rule.names[0].endswith("running_mean"):
            state[rule.names[0].removesuffix("running_mean") + COUNTER] = np.zeros((), np.int64)
    return state


class _Rule(NamedTuple):
    """How some leaves of a model are computed from some entries of a state dict, and back."""

    leaves: tuple[str, ...]
    names: tuple[str, ...]
    to_mlax: Callable[[Arrays], Arrays]
    to_torch: Callable[[Arrays], Arrays]
    index: tuple[int, ...] = ()  # into the stacks that the leaves are in


class _Place(NamedTuple):
    """A layer within the model: its input, its path, its module's name and its index in stacks of layers."""

    layer: Layer
    x: Any
    names: Mapping[str, str]
    shapes: Mapping[str, Any]  # of all leaves
    path: str = ""
    module: str = ""
    index: tuple[int, ...] = ()

    def part(self, name: str, layer: Layer, x: Any, default: str) -> "_Place":
        path = _join(self.path, name)
        module = _join(self.module, self.names.get(path, default), ".")
        return self._replace(layer=layer, x=x, path=path, module=module)

    def rule(
        self, leaf: str, name: str, to_mlax: Callable[[Any], Any] = lambda a: a, to_torch: Any = None
    ) -> Iterator[_Rule]:
        """The rule of one leaf, if the layer has it."""
        path = _join(self.path, leaf)
        if path in self.shapes:
            back = to_torch or to_mlax
            yield _Rule(
                (path,),
                (_join(self.module, name, "."),),
                lambda arrays: [to_mlax(arrays[0])],
                lambda arrays: [back(arrays[0])],
                self.index,
            )

    def shape(self, leaf: str) -> tuple[int, ...]:
        return self.shapes[_join(self.path, leaf)].shape[len(self.index) :]


def _all_rules(model: Layer, x: Any, names: Mapping[str, str], shapes: Mapping[str, Any]) -> list[_Rule]:
    """The rules of the whole model; a name for a part that it does not have is an error."""
    parts = {path for path, _ in find_layers(model, Layer)}
    parts.update("/".join(path.split("/")[:depth]) for path in shapes for depth in range(1, path.count("/") + 1))
    for path in names:
        if path not in parts:
            raise ValueError(f"from_torch: names: {no_match_message(path, sorted(parts))}")
    return list(_rules(_Place(model, x, names, shapes), ""))


def _rules(place: _Place, default: str) -> Iterator[_Rule]:
    """The rules of all leaves of a layer."""
    layer = place.layer
    own = next((rules for kinds, rules in _LAYERS if isinstance(layer, kinds)), None)
    if own is not None and not (isinstance(layer, MultiHeadAttention) and _has_names_below(place)):
        yield from own(place)
    elif isinstance(layer, Repeat) or (isinstance(layer, Map) and layer.has_stack):
        number, x = (layer.times, place.x) if isinstance(layer, Repeat) else layer.slices(place.x)
        for index in range(number):
            below = place.part("stacked", layer.layer, x, str(index))
            yield from _rules(below._replace(index=(*place.index, index)), "")
    elif isinstance(layer, Wrapper) and not isinstance(layer, LoRA):
        yield from _rules(place._replace(layer=layer.layer), default)
    elif isinstance(layer, Composite):
        inputs = part_inputs(layer, place.x)
        for position, (name, part) in enumerate(parts_of(layer.infer_sizes(place.x)).items()):
            yield from _rules(place.part(name, part, inputs[name], _module_name(layer, position, name, part)), "")
    elif any(path.startswith(_join(place.path, "")) or path == place.path for path in place.shapes):
        advice = "convert its variables by hand."
        if isinstance(layer, LoRA):
            advice = 'convert the model without LoRA, and add mlax.select(trainables, "**/lora/*") by mlax.merge.'
        raise TypeError(f"from_torch: {short_repr(layer)} at {place.path!r} has no counterpart in PyTorch; {advice}")


def _module_name(owner: Composite, position: int, name: str, part: Layer) -> str:
    """The name that a module has in PyTorch unless `names` says another."""
    if isinstance(owner, MLP):
        return str(2 * position)  # an activation stands between two Linears
    kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(part).__name__).lower()
    if isinstance(owner, Series) and re.fullmatch(rf"{kind}_\d+", name):
        return str(position)
    return name.replace("/", ".")


def _linear(place: _Place) -> Iterator[_Rule]:
    yield from place.rule("kernel", "weight", np.transpose)
    yield from place.rule("bias", "bias")


def _table(place: _Place) -> Iterator[_Rule]:
    yield from place.rule("table", "weight")


def _norm(place: _Place) -> Iterator[_Rule]:
    flat = () if isinstance(place.layer, LayerNorm | RMSNorm) else (-1,)
    for leaf, name in (("scale", "weight"), ("shift", "bias"), ("mean", "running_mean"), ("var", "running_var")):
        if _join(place.path, leaf) in place.shapes:
            shape = place.shape(leaf)
            yield from place.rule(leaf, name, lambda a, s=shape: a.reshape(s), lambda a: a.reshape(flat or a.shape))


def _slope(place: _Place) -> Iterator[_Rule]:
    shape = place.shape("slope")
    yield from place.rule("slope", "weight", lambda a: a.reshape(shape), lambda a: a.reshape(-1))


def _convolution(place: _Place) -> Iterator[_Rule]:
    layer: Any = place.layer
    axes = parse_layout(f"{layer}", layer.layout, place.x)
    ours = (axes.outputs, axes.inputs, *axes.window)
    groups = place.x.shape[axes.channel] if layer.groups == "depthwise" else layer.groups
    is_transposed = isinstance(layer, ConvTranspose)

    def to_mlax(weight: np.ndarray) -> np.ndarray:
        weight = _swap_in_groups(weight, groups) if is_transposed else weight
        return np.moveaxis(weight, range(weight.ndim), ours)

    def to_torch(kernel: np.ndarray) -> np.ndarray:
        kernel = np.moveaxis(kernel, ours, range(kernel.ndim))
        return _swap_in_groups(kernel, groups) if is_transposed else kernel

    yield from place.rule("kernel", "weight", to_mlax, to_torch)
    yield from place.rule("bias", "bias")


def _swap_in_groups(kernel: np.ndarray, groups: int) -> np.ndarray:
    """(inputs, outputs / groups, ...) as (outputs, inputs / groups, ...), and the other way round."""
    apart = kernel.reshape(groups, -1, *kernel.shape[1:])
    return np.moveaxis(apart, 1, 2).reshape(-1, apart.shape[1], *kernel.shape[2:])


def _attention(place: _Place) -> Iterator[_Rule]:
    """nn.MultiheadAttention's: one matrix for queries, keys and values, or three if their inputs differ in width."""
    parts = ("query", "key", "value")
    kernels, biases = ([_join(place.path, f"{part}/{leaf}") for part in parts] for leaf in ("kernel", "bias"))
    if len({place.shapes[kernel].shape for kernel in kernels}) == 1:
        names = (_join(place.module, "in_proj_weight", "."),)
        yield _Rule(tuple(kernels), names, _split_projections, _join_projections, place.index)
    else:
        for part in parts:
            yield from place.rule(f"{part}/kernel", f"{part[0]}_proj_weight", np.transpose)
    if biases[0] in place.shapes:
        names = (_join(place.module, "in_proj_bias", "."),)
        widths = np.cumsum([place.shapes[bias].shape[-1] for bias in biases])[:-1]
        yield _Rule(tuple(biases), names, lambda a: np.split(a[0], widths), lambda a: [np.concatenate(a)], place.index)
    yield from place.rule("out/kernel", "out_proj.weight", np.transpose)
    yield from place.rule("out/bias", "out_proj.bias")


def _split_projections(arrays: Arrays) -> Arrays:
    return [each.T for each in np.split(arrays[0], 3)]


def _join_projections(arrays: Arrays) -> Arrays:
    return [np.concatenate([each.T for each in arrays])]


def _has_names_below(place: _Place) -> bool:
    """Whether `names` speaks of the parts of a layer, which are then modules."""
    return any(path.startswith(f"{place.path}/") for path in place.names)


def _recurrent(place: _Place) -> Iterator[_Rule]:
    """The layers of one nn.RNN, nn.GRU or nn.LSTM."""
    layers = place.layer.layers if isinstance(place.layer, Stacked) else (place.layer,)
    number = 0
    for position, layer in enumerate(layers):
        below = f"layer_{position}" if isinstance(place.layer, Stacked) else ""
        cells: dict[str, Any] = {"": layer}
        if isinstance(layer, Bidirectional):
            cells = {"forward": layer.forward, "backward": layer.backward}
        if not all(isinstance(each, Recurrent) for each in cells.values()):
            continue  # such as Dropout, which has no variables
        for way, cell in cells.items():
            suffix = f"_l{number}_reverse" if way == "backward" else f"_l{number}"
            where = place._replace(layer=cell.layer, path=_join(_join(place.path, below), way))
            yield from _cell(where, suffix)
        number += 1


def _cell(place: _Place, suffix: str = "") -> Iterator[_Rule]:
    cell: Any = place.layer
    peephole, reset = getattr(cell, "peephole", False), getattr(cell, "reset", "after")
    if not isinstance(cell, RNNCell | GRUCell | LSTMCell) or peephole or reset == "before":
        raise TypeError(f"from_torch: {short_repr(cell)} at {place.path!r} has no counterpart in PyTorch.")
    yield from place.rule("input/kernel", f"weight_ih{suffix}", np.transpose)
    yield from place.rule("recurrent/kernel", f"weight_hh{suffix}", np.transpose)
    yield from place.rule("project/kernel", f"weight_hr{suffix}", np.transpose)
    if isinstance(cell, GRUCell) or getattr(cell, "recurrent_bias", False):
        yield from place.rule("input/bias", f"bias_ih{suffix}")
        yield from place.rule("recurrent/bias", f"bias_hh{suffix}")
    elif cell.bias:
        names = tuple(_join(place.module, f"bias_{each}{suffix}", ".") for each in ("ih", "hh"))
        leaves = (_join(place.path, "input/bias"),)
        yield _Rule(leaves, names, lambda a: [a[0] + a[1]], lambda a: [a[0], np.zeros_like(a[0])], place.index)


_LAYERS: list[tuple[Any, Callable[[_Place], Iterator[_Rule]]]] = [
    (Linear, _linear),
    ((Embed, EmbedBag, LearnedPositions), _table),
    ((BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm), _norm),
    (PReLU, _slope),
    ((Conv, ConvTranspose), _convolution),
    (MultiHeadAttention, _attention),
    ((Recurrent, Bidirectional, Stacked), _recurrent),
    ((RNNCell, GRUCell, LSTMCell), _cell),
]


def _all_shapes(model: Layer, x: Any) -> dict[str, Any]:
    """The shapes of all leaves, tied ones included."""
    trainables, non_trainables = variable_shapes(model, x)
    return {**flatten_paths(_untied_shapes(model, trainables)), **flatten_paths(non_trainables)}


def _untied_shapes(model: Layer, trainables: Tree) -> Tree:
    return jax.eval_shape(lambda tree: untie(model, tree), trainables) if find_layers(model, Tied) else trainables


def _look_up(state_dict: Mapping[str, Any], name: str, leaf: str, used: set[str]) -> np.ndarray:
    if name not in state_dict:
        close = difflib.get_close_matches(name, [each for each in state_dict if each not in used], n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"from_torch: {leaf} is looked up as {name!r}, which the state dict lacks; {hint}`names` says what the "
            "modules are called."
        )
    return np.asarray(state_dict[name])


def _fit(rule: _Rule, leaf: str, array: np.ndarray, like: Any) -> np.ndarray:
    """The array, if it has the shape and dtype of one layer of the leaf."""
    shape = like.shape[len(rule.index) :]
    if array.shape != shape or array.dtype != like.dtype:
        advice = "is it another model, or another input?"
        if array.shape == shape:
            advice = f'cast the state dict: {{name: value.astype("{like.dtype}") for name, value in state.items()}}.'
        raise ValueError(
            f"from_torch: {' and '.join(rule.names)} give {array.dtype}{list(array.shape)} for {leaf}, which must be "
            f"{like.dtype}{list(shape)}; {advice}"
        )
    return array


def _stack(arrays: dict[tuple[int, ...], np.ndarray]) -> np.ndarray:
    """The arrays by index as one, with the axes of the indices in front."""
    sizes = tuple(max(sizes) + 1 for sizes in zip(*arrays, strict=True))
    flat = [arrays[index] for index in np.ndindex(sizes)]
    return np.stack(flat).reshape(*sizes, *flat[0].shape) if sizes else flat[0]


def _pick(tree: Tree, leaves: Mapping[str, Any]) -> Tree:
    missing = [path for path in flatten_paths(tree) if path not in leaves]
    if missing:
        raise TypeError(f"from_torch: {_few(missing)} have no counterpart in PyTorch; convert them by hand.")
    return unflatten_paths((path, leaves[path]) for path in flatten_paths(tree))


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _join(path: str, name: str, by: str = "/") -> str:
    return f"{path}{by}{name}" if path and name else path or name
