"""Built-in plans: one device, data parallel, ZeRO, FSDP, tensor, sequence, expert and pipeline parallel."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from mlax.core import Composite, Layer, Map, Recurrent, Wrapper, flatten_paths, part_inputs, parts_of, variable_shapes
from mlax.place._pipeline import Schedule, Stages, find_pipelines
from mlax.place._plan import Plan
from mlax.place._rules import Device, Placement, shard_largest_axis, shard_last_axes


def single(device: Device | None = None) -> Plan:
    """Everything on one device, by default the first."""
    return Plan({}, devices=(device or jax.devices()[0],), name="single")


def data(number: int = -1, *, axis: str = "data") -> Plan:
    """Data parallelism: the batch is sharded, the weights are replicated, and gradients are all-reduced."""
    return Plan({axis: number}, batch=PartitionSpec(axis), name="data")


def fsdp(number: int = -1, *, axis: str = "data", min_size: int = 2**12) -> Plan:
    """Fully sharded data parallelism: the batch, each weight and each slot are sharded.

    Weights are all-gathered where they are used, and gradients are reduce-scattered. Arrays of fewer than `min_size`
    elements are replicated. Train the model that `plan.parallelize` returns. https://arxiv.org/abs/1910.02054, stage 3.
    """
    rules = [("**", shard_largest_axis(axis, min_size=min_size))]
    return Plan({axis: number}, rules, batch=PartitionSpec(axis), all_gather=(axis,), name="fsdp")


def zero(number: int = -1, *, axis: str = "data", min_size: int = 2**12) -> Plan:
    """ZeRO: the batch and each optimizer slot are sharded, the weights are replicated.

    https://arxiv.org/abs/1910.02054, stage 1.
    """
    rules = [("**", shard_largest_axis(axis, min_size=min_size))]
    return Plan({axis: number}, slots=rules, batch=PartitionSpec(axis), name="zero")


def tensor(model: Layer, x: Any, number: int, *, axis: str = "model") -> Plan:
    """Tensor parallelism: the heads of attention and the hidden features of MLPs are sharded, and so their weights.

    The rules are derived from `Layer.tensor_parallel_axes` of the model's layers. Section 3 of
    https://arxiv.org/abs/1909.08053.
    """
    axes = tensor_axes(model, x, number)
    if not axes:
        raise ValueError(f"tensor: no layer of the model can be sharded over {number} devices; try a smaller number.")
    return Plan({axis: number}, _axis_rules(axis, axes), name="tensor")


def sequence(number: int, *, parts: str = "*", axis: str = "sequence") -> Plan:
    """Sequence parallelism: activations are sharded along the axis after the batch, such as time or image rows.

    `parts` is a pattern for the parts whose outputs are sharded, by default the model's own parts. Train the model that
    `plan.parallelize` returns. Attention gathers the keys and values that it needs.
    """
    return Plan({axis: number}, activations=[(parts, PartitionSpec(None, axis))], name="sequence")


def expert(model: Layer, x: Any, number: int, *, axis: str = "expert") -> Plan:
    """Expert parallelism: the experts of every mixture are sharded, and the batch over the same devices.

    Train the model that `plan.parallelize` returns: an all-to-all sends examples to their experts and back, and no
    weight moves. https://arxiv.org/abs/2006.16668, section 3.
    """
    found = expert_axes(model, x)
    if not found:
        raise ValueError("expert: the model has no mixture of experts (nn.MoE); use another plan.")
    for path, (_, experts) in found.items():
        if experts % number:
            raise ValueError(
                f"expert: {path} has {experts} experts, which {number} devices do not divide; use a divisor of "
                f"{experts}."
            )
    rules = _axis_rules(axis, {path: at for path, (at, _) in found.items()})
    return Plan({axis: number}, rules, batch=PartitionSpec(axis), all_to_all=(axis,), name="expert")


def pipeline(
    model: Layer,
    number: int,
    *,
    microbatches: int,
    schedule: Schedule = "1f1b",
    at: tuple[str, ...] | None = None,
    axis: str = "stage",
) -> Plan:
    """Pipeline parallelism: the layers of every `Repeat`, or of those at the paths `at`, are distributed over stages.

    A batch is split into `microbatches`, which go from stage to stage; see `Stages` for the schedules. Train the model
    that `plan.parallelize` returns, in a step with this plan.
    """
    stages = Stages(number, microbatches, schedule, axis, at)
    paths = list(find_pipelines(stages.pipeline(model)))
    rules = [(f"{path}/**" if path else "**", PartitionSpec(axis)) for path in paths]
    others = [] if "" in paths else [("**", PartitionSpec())]  # "": the model is itself a Repeat
    return Plan({axis: number}, [*rules, *others], stages=stages, name="pipeline")


def tensor_axes(layer: Layer, x: Any, number: int) -> dict[str, int]:
    """The axis of each variable, counted from the end, over which tensor parallelism shards it; others are left out.

    A linear map whose input another one of the same composite made wider is sharded along its inputs, so that its
    partial sums are all-reduced; all others follow `Layer.tensor_parallel_axes`. An axis that `number` does not divide
    is left out.
    """
    if (own := layer.tensor_parallel_axes(number)) is not None:
        shapes = _variable_shapes(layer, x)
        axes = {path: axis - len(shapes[path]) if axis >= 0 else axis for path, axis in own.items() if path in shapes}
        return {path: axis for path, axis in axes.items() if shapes[path][axis] % number == 0}
    if isinstance(layer, Map):
        return tensor_axes(layer.layer, layer.slices(x)[1], number)
    if isinstance(layer, Wrapper) and not isinstance(layer, Recurrent):
        return tensor_axes(layer.layer, x, number)
    if not isinstance(layer, Composite):
        return {}
    found: dict[str, int] = {}
    expanded = None  # the width of the output of an earlier part that widened its input
    layer, inputs = layer.infer_sizes(x), part_inputs(layer, x)
    for name, part in parts_of(layer).items():
        axes, shapes = tensor_axes(part, inputs[name], number), _variable_shapes(part, inputs[name])
        if axes.get("kernel") == -1 and shapes["kernel"] == (expanded, *shapes["kernel"][1:]):
            axes, expanded = {"kernel": -2}, None
        elif width := _expanded_width(axes, shapes):
            expanded = width
        found |= {f"{name}/{path}": axis for path, axis in axes.items()}
    return found


def expert_axes(layer: Layer, x: Any) -> dict[str, tuple[int, int]]:
    """The axis of experts, counted from the end, and the number of experts, of each variable that has such an axis."""
    if isinstance(layer, Map) and layer.variables == 0:
        return {path: (-len(shape), shape[0]) for path, shape in _variable_shapes(layer, x).items()}
    if isinstance(layer, Wrapper):
        return expert_axes(layer.layer, x)
    if not isinstance(layer, Composite):
        return {}
    layer, inputs = layer.infer_sizes(x), part_inputs(layer, x)
    return {
        f"{name}/{path}": axis
        for name, part in parts_of(layer).items()
        for path, axis in expert_axes(part, inputs[name]).items()
    }


def _axis_rules(mesh_axis: str, axes: dict[str, int]) -> list[tuple[str, Placement | PartitionSpec]]:
    """Rules that shard one axis, counted from the end, of each of these variables, and replicate all others."""
    sharded = [(path, shard_last_axes(mesh_axis, *[None] * (-axis - 1))) for path, axis in axes.items()]
    return [*sharded, ("**", PartitionSpec())]


def _expanded_width(axes: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> int | None:
    """The output width of a part's linear maps, if all are sharded along their outputs and widen their inputs."""
    kernels = [path for path in axes if path.split("/")[-1] == "kernel"]
    widths = {shapes[path][-1] for path in kernels if axes[path] == -1 and shapes[path][-1] > shapes[path][-2]}
    return widths.pop() if len(widths) == 1 and all(axes[path] == -1 for path in kernels) else None


def _variable_shapes(layer: Layer, x: Any) -> dict[str, tuple[int, ...]]:
    trainables, _ = variable_shapes(layer, x)
    return {path: leaf.shape for path, leaf in flatten_paths(trainables).items()}
