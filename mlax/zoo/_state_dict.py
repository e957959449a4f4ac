"""state_dict: PyTorch's state dict of a model's variables, the inverse of load_weights."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from mlax.core import Layer, Tree, flatten_paths, short_repr
from mlax.zoo._weights import Weight, WeightMap, find_described


def state_dict(
    model: Layer, trainables: Tree, non_trainables: Tree = None, *, names: str | None = None
) -> dict[str, np.ndarray]:
    """The inverse of `load_weights`: PyTorch's state dict as NumPy arrays.

    `names` is the library, of several that the model's weight map has; None: the first.

    In PyTorch, `module.load_state_dict({name: torch.from_numpy(array) for name, array in zoo.state_dict(...).items()})`
    loads it.
    """
    weight_map = choose_weight_map(model, names)
    leaves = {**flatten_paths(trainables), **flatten_paths(non_trainables)}
    state = {entry.name: entry.read(leaves) for entry in state_entries(weight_map, leaves)}
    return state | {name: state[other] for name, other in weight_map.tied.items() if other in state}


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
        if len(shapes) < 2:
            return self.weight.shape_in_file(shapes[0]) if shapes else ()
        return self.weight.shape_in_file((*shapes[0][:-1], sum(shape[-1] for shape in shapes)))

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
    for paths, weight in present:
        for index in weight.indices(leaves[paths[0]]):
            yield StateEntry(weight.fill(index), tuple(paths), weight, index)
            if weight.counter is not None:
                yield StateEntry(weight.fill(index, weight.counter), (), weight, index)


def choose_weight_map(model: Layer, names: str | None) -> WeightMap:
    """The weight map with the names of a library."""
    weight_map = find_described(model).weight_map()
    if names is None:
        return weight_map
    if names not in weight_map.others:
        others = ", ".join(map(repr, weight_map.others)) or "no other names"
        raise ValueError(f"{short_repr(model)}: names is {names!r}, but the weight map has {others} besides None.")
    return weight_map.others[names]
