"""state_dict: PyTorch's state dict of a model's variables, the inverse of load_weights."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from mlax.core import Layer, Tree, flatten_paths, short_repr, variable_shapes
from mlax.zoo._weights import Weight, WeightMap, check_unique, concatenated_shape, find_described, read_weight_map


def state_dict(
    model: Layer, trainables: Tree, non_trainables: Tree = None, *, names: str | None = None
) -> dict[str, np.ndarray]:
    """The inverse of `load_weights`: PyTorch's state dict as NumPy arrays.

    `names` is the library, of several that the model's weight map has; None: the first. PyTorch's counters of steps of
    batch normalization, num_batches_tracked, are written as 0.

    In PyTorch, `module.load_state_dict({name: torch.from_numpy(array) for name, array in zoo.state_dict(...).items()})`
    loads it.
    """
    weight_map = choose_weight_map(model, names)
    leaves = {**flatten_paths(trainables), **flatten_paths(non_trainables)}
    entries = list(state_entries(weight_map, leaves))
    _check_none_missing(model, leaves)
    state = {entry.name: entry.read(leaves) for entry in entries}
    return state | {name: state[other] for name, other in weight_map.tied.items() if other in state}


def _check_none_missing(model: Layer, leaves: Mapping[str, Any]) -> None:
    wanted = variable_shapes(model, find_described(model).example_input())
    missing = [path for tree in wanted for path in flatten_paths(tree) if path not in leaves]
    if missing:
        more = ", ..." if len(missing) > 5 else ""
        raise ValueError(
            f"state_dict: {short_repr(model)} has variables that were not passed, {', '.join(missing[:5])}{more}; pass "
            "both trainables and non_trainables, as its init or zoo.load_weights returns them."
        )


class StateEntry(NamedTuple):
    """An array of a state dict, not computed yet."""

    name: str
    paths: tuple[str, ...]  # of the leaves that it holds; none: a counter of PyTorch, which is zero
    weight: Weight
    index: tuple[int, ...]

    def read(self, leaves: Mapping[str, Any]) -> np.ndarray:
        """The array."""
        if not self.paths:
            return np.zeros((), np.int64)
        parts = [_to_host(leaves[path], self.index) for path in self.paths]
        return self.weight.to_file(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1))

    def shape(self, leaves: Mapping[str, Any]) -> tuple[int, ...]:
        """The shape of the array, without computing it."""
        shapes = [leaves[path].shape[len(self.index) :] for path in self.paths]
        return self.weight.shape_in_file(concatenated_shape(shapes)) if shapes else ()

    def nbytes(self, leaves: Mapping[str, Any]) -> int:
        """The size of the array."""
        return math.prod(self.shape(leaves)) * self.dtype(leaves).itemsize

    def dtype(self, leaves: Mapping[str, Any]) -> np.dtype:
        """The dtype of the array, without computing it."""
        return np.dtype(leaves[self.paths[0]].dtype if self.paths else np.int64)


def _to_host(leaf: Any, index: tuple[int, ...]) -> np.ndarray:
    """One index of a leaf; of a stack on an accelerator only that is copied, since JAX keeps what NumPy gets."""
    on_cpu = not isinstance(leaf, jax.Array) or all(device.platform == "cpu" for device in leaf.devices())
    return np.asarray(leaf)[index] if on_cpu or not index else np.asarray(leaf[index])


def state_entries(weight_map: WeightMap, leaves: Mapping[str, Any]) -> Iterator[StateEntry]:
    """The entries of the state dict of these leaves, in the order of the weight map."""
    present = list(weight_map.present(leaves))
    if unnamed := sorted(leaves.keys() - {path for paths, _ in present for path in paths}):
        raise ValueError(
            f"state_dict: the weight map has no name for {', '.join(unnamed[:5])}; merge adapters, and save a "
            "quantized model by files.save, or before it is quantized."
        )
    owners = {name: f"the tied {other}" for name, other in weight_map.tied.items()}
    for paths, weight in present:
        for index in weight.indices(leaves[paths[0]]):
            name = weight.fill(index)
            check_unique(owners, name, paths[0])
            yield StateEntry(name, tuple(paths), weight, index)
            if weight.counter is not None:
                yield StateEntry(weight.fill(index, weight.counter), (), weight, index)


def choose_weight_map(model: Layer, names: str | None) -> WeightMap:
    """The weight map with the names of a library."""
    weight_map = read_weight_map(model)
    if names is None:
        return weight_map
    if names not in weight_map.others:
        others = ", ".join(map(repr, weight_map.others)) or "no other names"
        raise ValueError(f"{short_repr(model)}: names is {names!r}, but the weight map has {others} besides None.")
    return weight_map.others[names]
