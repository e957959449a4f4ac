"""The axis of each variable that tensor parallelism and expert parallelism shard, derived from the model."""

from typing import Any

from mlax.core import (
    STACKED,
    Composite,
    Layer,
    Map,
    Recurrent,
    Tied,
    Wrapper,
    find_layers,
    flatten_paths,
    part_inputs,
    parts_of,
    stacked_axes,
    variable_shapes,
)


def tensor_axes(layer: Layer, x: Any, number: int) -> dict[str, int]:
    """The axis of each variable, counted from the end, over which tensor parallelism shards it; others are left out.

    Layers name it by `tensor_parallel_axes`. But where one linear map of a composite widens its input and a later one
    takes that width, as in an MLP, the second is sharded along its inputs, and its partial sums are all-reduced:
    Megatron's column and row parallelism. An axis that `number` does not divide is left out.
    """
    if (own := layer.tensor_parallel_axes(number)) is not None:
        shapes = _variable_shapes(layer, x)
        axes = {path: axis - len(shapes[path]) if axis >= 0 else axis for path, axis in own.items() if path in shapes}
        return {path: axis for path, axis in axes.items() if shapes[path][axis] % number == 0}
    if isinstance(layer, Tied):
        return _tied_axes(layer, x, tensor_axes(layer.layer, x, number))
    if isinstance(layer, Wrapper) and not isinstance(layer, Recurrent):
        axes = tensor_axes(layer.layer, layer.slices(x)[1] if isinstance(layer, Map) else x, number)
        return {f"{STACKED}/{path}" if layer.has_stack else path: axis for path, axis in axes.items()}
    if not isinstance(layer, Composite):
        return {}
    found: dict[str, int] = {}
    expanded = None  # the width of the output of an earlier part that widened its input
    layer, inputs = layer.infer_sizes(x), part_inputs(layer, x)
    for name, part in parts_of(layer).items():
        axes, shapes = tensor_axes(part, inputs[name], number), _variable_shapes(part, inputs[name])
        outputs = _output_axes(part, number)
        if _is_sharded_along_outputs("kernel", axes, outputs) and shapes["kernel"][-3 - axes["kernel"]] == expanded:
            axes, expanded = {"kernel": -3 - axes["kernel"]}, None
        elif width := _expanded_width(axes, shapes, outputs):
            expanded = width
        found |= {f"{name}/{path}": axis for path, axis in axes.items()}
    return found


def expert_axes(layer: Layer, x: Any) -> dict[str, tuple[int, int]]:
    """The axis of experts, counted from the end, and the number of experts, of each variable that has such an axis."""
    if isinstance(layer, Map) and layer.has_stack:
        return {path: (-len(shape), shape[0]) for path, shape in _variable_shapes(layer, x).items()}
    if isinstance(layer, Wrapper):
        axes = expert_axes(layer.layer, layer.slices(x)[1] if isinstance(layer, Map) else x)
        axes = {path: axis for path, axis in axes.items() if path not in _tied_leaves(layer)}
        return {f"{STACKED}/{path}" if layer.has_stack else path: axis for path, axis in axes.items()}
    if not isinstance(layer, Composite):
        return {}
    layer, inputs = layer.infer_sizes(x), part_inputs(layer, x)
    return {
        f"{name}/{path}": axis
        for name, part in parts_of(layer).items()
        for path, axis in expert_axes(part, inputs[name]).items()
    }


def _tied_axes(tied: Tied, x: Any, axes: dict[str, int]) -> dict[str, int]:
    """The axes without those of tied leaves, which are not stored; the leaf that one is tied to takes its axis."""
    shapes = _variable_shapes(tied, x)
    for tie in tied.ties:
        axis = axes.get(tie.leaf)
        if axis is not None and tie.to not in axes:
            rank = len(shapes[tie.to]) - stacked_axes(tie.to)
            axes[tie.to] = -rank - 1 - axis if tie.transpose else axis
    return {path: axis for path, axis in axes.items() if path not in _tied_leaves(tied)}


def _tied_leaves(layer: Wrapper) -> set[str]:
    return {tie.leaf for tie in layer.ties} if isinstance(layer, Tied) else set()


def _expanded_width(axes: dict[str, int], shapes: dict[str, tuple[int, ...]], outputs: dict[str, int]) -> int | None:
    """The output width of a part's linear maps, if all are sharded along their outputs and widen their inputs."""
    kernels = [path for path in axes if path.split("/")[-1] == "kernel"]
    if not all(_is_sharded_along_outputs(path, axes, outputs) for path in kernels):
        return None
    sizes = [(shapes[path][axes[path]], shapes[path][-3 - axes[path]]) for path in kernels]
    widths = {width for width, inputs in sizes if width > inputs}
    return widths.pop() if len(widths) == 1 else None


def _output_axes(layer: Layer, number: int) -> dict[str, int]:
    """The axis of outputs of each kernel: the one that its own layer names, whatever the layers around it name."""
    found = [(path, each.tensor_parallel_axes(number) or {}) for path, each in find_layers(layer, Layer)]
    return {"/".join(filter(None, (path, "kernel"))): axes["kernel"] for path, axes in found if "kernel" in axes}


def _is_sharded_along_outputs(path: str, axes: dict[str, int], outputs: dict[str, int]) -> bool:
    """Whether the kernel at a path is a linear map, (in, out) or (out, in), and sharded along its outputs."""
    return axes.get(path) in (-1, -2) and axes[path] == outputs.get(path)


def _variable_shapes(layer: Layer, x: Any) -> dict[str, tuple[int, ...]]:
    trainables, _ = variable_shapes(layer, x)
    return {path: leaf.shape for path, leaf in flatten_paths(trainables).items()}
