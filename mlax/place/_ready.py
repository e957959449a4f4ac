"""Ready plans: one device, data parallel, FSDP, tensor, sequence, expert and pipeline parallel; they multiply."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from mlax.core import Layer
from mlax.place._in_stages import pipelines
from mlax.place._plan import Plan
from mlax.place._split import expert_axes, split_axes
from mlax.place._stages import Schedule, Stages
from mlax.place._where import Device, Where, last, spread


def single(device: Device | None = None) -> Plan:
    """Everything on one device, the first unless given."""
    return Plan({}, devices=(device or jax.devices()[0],), name="single")


def data(number: int = -1, *, axis: str = "data") -> Plan:
    """Each device computes a part of the batch with all of the weights; the gradients are summed over all of them."""
    return Plan({axis: number}, batch=PartitionSpec(axis), name="data")


def fsdp(number: int = -1, *, axis: str = "data", least: int = 2**12) -> Plan:
    """Each device computes a part of the batch and keeps a part of each weight and slot.

    Weights are gathered where they are used, and each device gets the sum of its own part of the gradient. Arrays of
    fewer than `least` numbers stay whole. https://arxiv.org/abs/1910.02054, stage 3.
    """
    spreads = [("**", spread(axis, least=least))]
    return Plan({axis: number}, spreads, batch=PartitionSpec(axis), gather=(axis,), name="fsdp")


def zero(number: int = -1, *, axis: str = "data", least: int = 2**12) -> Plan:
    """Each device computes a part of the batch with all of the weights, and keeps a part of each slot.

    https://arxiv.org/abs/1910.02054, stage 1.
    """
    spreads = [("**", spread(axis, least=least))]
    return Plan({axis: number}, slots=spreads, batch=PartitionSpec(axis), name="zero")


def tensor(model: Layer, x: Any, number: int, *, axis: str = "model") -> Plan:
    """Each device computes a part of every wide layer: some heads of an attention, some of an MLP's hidden features.

    The rules are what the model's own layers say (`Layer.splits`). https://arxiv.org/abs/1909.08053, section 3.
    """
    axes = split_axes(model, x, number)
    if not axes:
        raise ValueError(f"tensor: no layer of the model can be split into {number}; a smaller number might do.")
    rules: list[tuple[str, Where]] = [(path, last(axis, *[None] * (-at - 1))) for path, at in axes.items()]
    return Plan({axis: number}, [*rules, ("**", PartitionSpec())], name="tensor")


def sequence(number: int, *, parts: str = "*", axis: str = "sequence") -> Plan:
    """Each device computes a part of the time steps, or of the rows of an image: the axis after the batch.

    `parts` is a pattern of the parts whose outputs are split so, those of the model itself unless given; call the
    model that `plan.wired` gives. Attention gathers what it needs of the keys and values.
    """
    return Plan({axis: number}, activations=[(parts, PartitionSpec(None, axis))], name="sequence")


def expert(model: Layer, x: Any, number: int, *, axis: str = "expert") -> Plan:
    """Each device keeps and computes some of the experts of every mixture, and a part of the batch.

    Call the model that `plan.wired` gives: examples are then sent to the experts and back, and no weight moves.
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
    rules = [(path, last(axis, *[None] * (-at - 1))) for path, (at, _) in found.items()]
    placed = [*rules, ("**", PartitionSpec())]
    return Plan({axis: number}, placed, batch=PartitionSpec(axis), exchange=(axis,), name="expert")


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
    the model that `plan.wired` gives, inside a step with this plan.
    """
    stages = Stages(number, microbatches, schedule, axis, at)
    paths = list(pipelines(stages.wired(model)))
    rules = [(f"{path}/**" if path else "**", PartitionSpec(axis)) for path in paths]
    rest = [] if "" in paths else [("**", PartitionSpec())]  # the model itself may be the one that is cut
    return Plan({axis: number}, [*rules, *rest], stages=stages, name="pipeline")
