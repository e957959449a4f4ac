"""Built-in plans: one device, data parallel, ZeRO, FSDP, tensor, sequence, expert and pipeline parallel."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from mlax.core import Layer
from mlax.place._pipeline import PipelineConfig, Schedule, find_pipelines
from mlax.place._plan import Plan
from mlax.place._rules import Device, Placement, shard_largest_axis, shard_last_axes
from mlax.place._tensor_axes import expert_axes, tensor_axes


def single(device: Device | None = None) -> Plan:
    """No parallelism: everything on one device, by default the first."""
    return Plan({}, devices=(device or jax.devices()[0],), name="single")


def data(number: int = -1, *, axis: str = "data") -> Plan:
    """Data parallelism: the batch is sharded, the weights are replicated, and gradients are all-reduced."""
    return Plan({axis: number}, batch=PartitionSpec(axis), name="data")


def fsdp(number: int = -1, *, axis: str = "data", min_size: int = 2**12) -> Plan:
    """Fully sharded data parallelism (FSDP, ZeRO stage 3): the batch, each weight and each slot are sharded.

    Weights are all-gathered where they are used, and gradients are reduce-scattered. Arrays of fewer than `min_size`
    elements are replicated. Train the model that `plan.parallelize` returns. https://arxiv.org/abs/1910.02054
    """
    rules = [("**", shard_largest_axis(axis, min_size=min_size))]
    return Plan({axis: number}, rules, batch=PartitionSpec(axis), all_gather=(axis,), name="fsdp")


def zero(number: int = -1, *, axis: str = "data", min_size: int = 2**12) -> Plan:
    """ZeRO stage 1: the batch and each optimizer slot are sharded, the weights are replicated.

    https://arxiv.org/abs/1910.02054, section 5.1.
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

    A batch is split into `microbatches`, which go from stage to stage; see `PipelineConfig` for the schedules. Train
    the model that `plan.parallelize` returns, in a step with this plan.
    """
    config = PipelineConfig(number, microbatches, schedule, axis, at)
    paths = list(find_pipelines(config.apply(model)))
    rules = [(f"{path}/**" if path else "**", PartitionSpec(axis)) for path in paths]  # "": the model is a Repeat
    return Plan({axis: number}, rules, pipeline=config, name="pipeline")


def _axis_rules(mesh_axis: str, axes: dict[str, int]) -> list[tuple[str, Placement | PartitionSpec]]:
    """Rules that shard one axis, counted from the end, of each of these variables; all others are replicated."""
    return [(path, shard_last_axes(mesh_axis, *[None] * (-axis - 1))) for path, axis in axes.items()]
