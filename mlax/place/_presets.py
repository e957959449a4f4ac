"""Built-in plans: one device, data parallel, ZeRO, FSDP, tensor, sequence, expert and pipeline parallel."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from mlax.core import Composite, Layer, Map, Recurrent, Wrapper, flatten_paths, part_inputs, parts_of, variable_shapes
from mlax.place._pipeline import Schedule, Stages, find_pipelines
from mlax.place._plan import Plan
from mlax.place._rules import Device, Placement, shard_largest_axis, shard_last_axes


def single(device: Device | None = None) -> Plan:
    """Everything on one device, the first unless given."""
    return Plan({}, devices=(device or jax.devices()[0],), name="single")


def data(number: int = -1, *, axis: str = "data") -> Plan:
    """Each device computes a part of the batch with all of the weights; the gradients are summed over all of them."""
    return Plan({axis: number}, batch=PartitionSpec(axis), name="data")


def fsdp(number: int = -1, *, axis: str = "data", min_size: int = 2**12) -> Plan:
    """Each device computes a part of the batch and keeps a part of each weight and slot.

    Weights are gathered where they are used, and each device gets the sum of its own part of the gradient. Arrays of
    fewer than `min_size` elements stay whole. https://arxiv.org/abs/1910.02054, stage 3.
    """
    spreads = [("**", shard_largest_axis(axis, min_size=min_size))]
    return Plan({axis: number}, spreads, batch=PartitionSpec(axis), all_gather=(axis,), name="fsdp")


def zero(number: int = -1, *, axis: str = "data", min_size: int = 2**12) -> Plan:
    """Each device computes a part of the batch with all of the weights, and keeps a part of each slot.

    https://arxiv.org/abs/1910.02054, stage 1.
    """
    spreads = [("**", shard_largest_axis(axis, min_size=min_size))]
    return Plan({axis: number}, slots=spreads, batch=PartitionSpec(axis), name="zero")


def tensor(model: Layer, x: Any, number: int, *, axis: str = "model") -> Plan:
    """Each device computes a part of every wide layer: some heads of an attention, some of an MLP's hidden features.

    The rules are what the model's own layers say (`Layer.splits`). https://arxiv.org/abs/1909.08053, section 3.
    """
    axes = tensor_axes(model, x, number)
    if not axes:
        raise ValueError(f"tensor: no layer of the model can be split into {number}; a smaller number might do.")
    rules: list[tuple[str, Placement]] = [
        (path, shard_last_axes(axis, *[None] * (-at - 1))) for path, at in axes.items()
    ]
    return Plan({axis: number}, [*rules, ("**", PartitionSpec())], name="tensor")


def sequence(number: int, *, parts: str = "*", axis: str = "sequence") -> Plan:
    """Each device computes a part of the time steps, or of the rows of an image: the axis after the batch.

    `parts` is a pattern of the parts whose outputs are split so, those of the model itself unless given; call the
    model that `plan.parallelize` gives. Attention gathers what it needs of the keys and values.
    """
    return Plan({axis: number}, activations=[(parts, PartitionSpec(None, axis))], name="sequence")


def expert(model: Layer, x: Any, number: int, *, axis: str = "expert") -> Plan:
    """Each device keeps and computes some of the experts of every mixture, and a part of the batch.

    Call the model that `plan.parallelize` gives: examples are then sent to the experts and back, and no weight moves.
    https://arxiv.org/abs/2006.16668, section 3.
    """
    found = expert_axes(model, x)
    if not found:
        raise ValueError("expert: the model has no mixture of experts (nn.MoE); take another plan.")
    for path, (_, experts) in found.items():
        if experts % number:
            raise ValueError(
                f"expert: {path} is of {experts} experts, which {number} devices do not divide; take a divisor of it."
            )
    rules = [(path, shard_last_axes(axis, *[None] * (-at - 1))) for path, (at, _) in found.items()]
    placed = [*rules, ("**", PartitionSpec())]
    return Plan({axis: number}, placed, batch=PartitionSpec(axis), all_to_all=(axis,), name="expert")


def pipeline(
    model: Layer,
    number: int,
    *,
    microbatches: int,
    schedule: Schedule = "1f1b",
    at: tuple[str, ...] | None = None,
    axis: str = "stage",
) -> Plan:
    """Each device keeps and computes some of the times of every `Repeat`, or of those at the paths `at`.

    The parts of a batch, `microbatches`, follow each other from device to device; see `Stages` for the schedules. Call
    the model that `plan.parallelize` gives, inside a step with this plan.
    """
    stages = Stages(number, microbatches, schedule, axis, at)
    paths = list(find_pipelines(stages.pipeline(model)))
    rules = [(f"{path}/**" if path else "**", PartitionSpec(axis)) for path in paths]
    rest = [] if "" in paths else [("**", PartitionSpec())]  # the model itself may be the one that is cut
    return Plan({axis: number}, [*rules, *rest], stages=stages, name="pipeline")


def tensor_axes(layer: Layer, x: Any, number: int) -> dict[str, int]:
    """The axis of each variable, counted from the end, along which `number` devices can share the layer's work.

    A linear map that takes what another one of the same composite made wider is divided along its inputs and so adds
    up the pieces where they are; all else is as `Layer.splits` says. An axis that `number` does not divide is left out.
    """
    if (own := layer.splits(number)) is not None:
        shapes = {path: leaf.shape for path, leaf in flatten_paths(variable_shapes(layer, x)[0]).items()}
        found = {path: axis - len(shapes[path]) if axis >= 0 else axis for path, axis in own.items() if path in shapes}
        return {path: axis for path, axis in found.items() if shapes[path][axis] % number == 0}
    if isinstance(layer, Map):
        return tensor_axes(layer.layer, layer.slices(x)[1], number)
    if isinstance(layer, Wrapper) and not isinstance(layer, Recurrent):
        return tensor_axes(layer.layer, x, number)
    if not isinstance(layer, Composite):
        return {}
    found: dict[str, int] = {}
    widened = None  # what the parts before made of their input, if that was wider
    layer, inputs = layer.sized(x), part_inputs(layer, x)
    for name, part in parts_of(layer).items():
        axes = tensor_axes(part, inputs[name], number)
        shapes = {path: leaf.shape for path, leaf in flatten_paths(variable_shapes(part, inputs[name])[0]).items()}
        if axes.get("kernel") == -1 and shapes["kernel"] == (widened, *shapes["kernel"][1:]):
            axes, widened = {"kernel": -2}, None
        elif wider := _expanded_width(axes, shapes):
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


def _expanded_width(axes: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> int | None:
    """What the linear maps of a part give, if all of them are split along that and it is more than they take."""
    kernels = [path for path in axes if path.split("/")[-1] == "kernel"]
    widths = {shapes[path][-1] for path in kernels if axes[path] == -1 and shapes[path][-1] > shapes[path][-2]}
    return widths.pop() if len(widths) == 1 and all(axes[path] == -1 for path in kernels) else None
