"""Which axis of each variable divides a model's work, as its own layers say it."""

from typing import Any

from mlax.core import Composite, Layer, Map, Recurrent, Wrapper, flatten_paths, part_inputs, parts_of, variable_shapes


def split_axes(layer: Layer, x: Any, number: int) -> dict[str, int]:
    """The axis of each variable, counted from the end, along which `number` devices can share the layer's work.

    A linear map that takes what another one of the same composite made wider is divided along its inputs and so adds
    up the pieces where they are; all else is as `Layer.splits` says. An axis that `number` does not divide is left out.
    """
    if (own := layer.splits(number)) is not None:
        shapes = {path: leaf.shape for path, leaf in flatten_paths(variable_shapes(layer, x)[0]).items()}
        found = {path: axis - len(shapes[path]) if axis >= 0 else axis for path, axis in own.items() if path in shapes}
        return {path: axis for path, axis in found.items() if shapes[path][axis] % number == 0}
    if isinstance(layer, Map):
        return split_axes(layer.layer, layer.slices(x)[1], number)
    if isinstance(layer, Wrapper) and not isinstance(layer, Recurrent):
        return split_axes(layer.layer, x, number)
    if not isinstance(layer, Composite):
        return {}
    found: dict[str, int] = {}
    widened = None  # what the parts before made of their input, if that was wider
    layer, inputs = layer.sized(x), part_inputs(layer, x)
    for name, part in parts_of(layer).items():
        axes = split_axes(part, inputs[name], number)
        shapes = {path: leaf.shape for path, leaf in flatten_paths(variable_shapes(part, inputs[name])[0]).items()}
        if axes.get("kernel") == -1 and shapes["kernel"] == (widened, *shapes["kernel"][1:]):
            axes, widened = {"kernel": -2}, None
        elif wider := _widened(axes, shapes):
            widened = wider
        found |= {f"{name}/{path}": axis for path, axis in axes.items()}
    return found


def expert_axes(layer: Layer, x: Any) -> dict[str, tuple[int, int]]:
    """The axis of the experts in each variable that has one, counted from the end, and how many they are."""
    if isinstance(layer, Map) and layer.variables == 0:
        leaves = flatten_paths(variable_shapes(layer, x)[0])
        return {path: (-len(leaf.shape), leaf.shape[0]) for path, leaf in leaves.items()}
    if isinstance(layer, Wrapper):
        return expert_axes(layer.layer, x)
    if not isinstance(layer, Composite):
        return {}
    layer, inputs = layer.sized(x), part_inputs(layer, x)
    return {
        f"{name}/{path}": axis
        for name, part in parts_of(layer).items()
        for path, axis in expert_axes(part, inputs[name]).items()
    }


def _widened(axes: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> int | None:
    """What the linear maps of a part give, if all of them are split along that and it is more than they take."""
    kernels = [path for path in axes if path.split("/")[-1] == "kernel"]
    widths = {shapes[path][-1] for path in kernels if axes[path] == -1 and shapes[path][-1] > shapes[path][-2]}
    return widths.pop() if len(widths) == 1 and all(axes[path] == -1 for path in kernels) else None
