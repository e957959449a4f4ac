"""auto: of the built-in plans that fit, the one that transfers least."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from mlax.core import Layer
from mlax.inspect import format_bytes
from mlax.optim import Optimizer
from mlax.place._estimate import Objective
from mlax.place._plan import Plan
from mlax.place._presets import data, expert, fsdp, single, tensor, zero
from mlax.place._report import Description, NotEnoughMemory
from mlax.place._rules import Device


class Candidate(NamedTuple):
    """A plan that `auto` considers, and the memory and transfers of a step under it."""

    plan: Plan
    description: Description | None  # None if the plan does not suit the model or the batch
    reason: str  # why it cannot be chosen; empty if it fits

    @property
    def bytes_sent(self) -> int:
        """Bytes that each device sends in a step."""
        assert self.description is not None and self.description.transfers is not None
        return sum(row.sent for row in self.description.transfers.totals)


def auto(
    model: Layer,
    x: Any,
    devices: Sequence[Device] | None = None,
    optimizer: Optimizer | None = None,
    batch: Any = None,
    *,
    objective: Objective | None = None,
    memory: int | None = None,
    log: Callable[[str], None] = print,
) -> Plan:
    """The built-in plan over all devices that fits and sends the fewest bytes in a step; logs each plan considered.

    The plans that the model and the batch allow are compiled one after another, which allocates nothing; see
    `Plan.describe` for the arguments. Of equal plans the simpler one is chosen.
    """
    devices = tuple(devices or jax.devices())
    candidates: list[Candidate] = []
    for plan in _candidate_plans(model, x, devices):
        candidates.append(_evaluate(plan, model, x, optimizer, batch, objective, memory))
        log(_summary_line(candidates[-1]))
    fitting = [each for each in candidates if each.description is not None and each.description.fits]
    if not fitting:
        described = [each.description for each in candidates if each.description is not None]
        if not described:
            raise ValueError(f"auto: no built-in plan shards this model and batch over {len(devices)} devices.")
        closest = min(described, key=lambda description: description.needed)
        raise NotEnoughMemory(f"auto: no built-in plan fits. The closest: {closest.shortage()}")
    best = min(fitting, key=lambda each: each.bytes_sent)
    reason = "fits and sends least" if len(fitting) == len(candidates) else "sends least of those that fit"
    log(f"{best.plan.name}: {reason}, {format_bytes(best.bytes_sent)} from each device in a step")
    return best.plan


def _candidate_plans(model: Layer, x: Any, devices: tuple[Device, ...]) -> Iterator[Plan]:
    """The plans to consider over these devices, the simplest first; no pipelines and no sequence parallelism."""
    number = len(devices)
    if number == 1:
        yield single(devices[0])
        return
    plans: list[Plan] = [data(number), zero(number), fsdp(number)]
    for inner in (divisor for divisor in range(2, number + 1) if number % divisor == 0):
        for preset in (tensor, expert):
            try:
                plan = preset(model, x, inner)
            except ValueError:  # the model has nothing to shard in this way
                continue
            outer = number // inner
            plans += [plan] if outer == 1 else [data(outer) * plan, fsdp(outer) * plan]
    for plan in plans:
        yield plan.over(devices)


def _evaluate(plan: Plan, model: Layer, x: Any, optimizer: Any, batch: Any, objective: Any, memory: Any) -> Candidate:
    try:
        description = plan.describe(model, x, optimizer, batch, objective=objective, memory=memory)
    except ValueError as error:
        return Candidate(plan, None, str(error))
    return Candidate(plan, description, "" if description.fits else "does not fit")


def _summary_line(candidate: Candidate) -> str:
    axes = ", ".join(f"{axis} {size}" for axis, size in candidate.plan.shape.items())
    name = f"{candidate.plan.name} ({axes})"
    if candidate.description is None:
        return f"{name:40} {candidate.reason}"
    needs = f"needs {format_bytes(candidate.description.needed)} a device, sends {format_bytes(candidate.bytes_sent)}"
    return f"{name:40} {needs}{'; ' * bool(candidate.reason)}{candidate.reason}"
