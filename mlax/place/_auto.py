"""auto: the plan that moves least, of those that fit."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from mlax.core import Layer
from mlax.inspect import format_bytes
from mlax.optim import Optimizer
from mlax.place._describe import Objective
from mlax.place._description import Description, NotEnoughMemory
from mlax.place._plan import Plan
from mlax.place._presets import data, expert, fsdp, single, tensor, zero
from mlax.place._rules import Device


class Candidate(NamedTuple):
    """A plan that was looked at."""

    plan: Plan
    description: Description | None  # None if it cannot be
    why: str  # it was not taken; empty if it fits

    @property
    def sent(self) -> int:
        """The bytes that each device sends in a step."""
        assert self.description is not None and self.description.moved is not None
        return sum(row.sent for row in self.description.moved.totals)


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
    """The plan that sends least in a step among those that fit, of all devices; it says what it looked at and why.

    The ready plans that the model and the batch allow are compiled one after another, which allocates nothing; see
    `Plan.describe` for the arguments. If two are equal the simpler one is taken.
    """
    devices = tuple(devices or jax.devices())
    candidates: list[Candidate] = []
    for plan in _candidate_plans(model, x, devices):
        looked = _evaluate(plan, model, x, optimizer, batch, objective, memory)
        candidates.append(looked)
        log(_summary_line(looked))
    fitting = [each for each in candidates if each.description is not None and each.description.fits]
    if not fitting:
        closest = min(
            (each.description for each in candidates if each.description is not None),
            key=lambda description: description.needed,
            default=None,
        )
        if closest is None:
            raise ValueError(f"auto: no ready plan divides this model and batch over {len(devices)} devices.")
        try:
            closest.check_fits()
        except NotEnoughMemory as error:
            raise NotEnoughMemory(f"auto: no ready plan fits. The closest: {error}") from None
    best = min(fitting, key=lambda each: each.sent)
    reason = "fits and sends least" if len(fitting) == len(candidates) else "sends least of those that fit"
    log(f"{best.plan.name}: {reason}, {format_bytes(best.sent)} from each device in a step")
    return best.plan


def _candidate_plans(model: Layer, x: Any, devices: tuple[Device, ...]) -> Iterator[Plan]:
    """The ready plans over these devices, the simplest first."""
    number = len(devices)
    if number == 1:
        yield single(devices[0])
        return
    ready: list[Plan] = [data(number), zero(number), fsdp(number)]
    for ways in (ways for ways in range(2, number + 1) if number % ways == 0):
        for split in (tensor, expert):
            try:
                within = split(model, x, ways)
            except ValueError:  # the model has nothing to split so
                continue
            rest = number // ways
            ready += [within] if rest == 1 else [data(rest) * within, fsdp(rest) * within]
    for plan in ready:
        yield plan.over(devices)


def _evaluate(plan: Plan, model: Layer, x: Any, optimizer: Any, batch: Any, objective: Any, memory: Any) -> Candidate:
    try:
        found = plan.describe(model, x, optimizer, batch, objective=objective, memory=memory)
    except ValueError as error:
        return Candidate(plan, None, str(error))
    return Candidate(plan, found, "" if found.fits else "does not fit")


def _summary_line(candidate: Candidate) -> str:
    axes = ", ".join(f"{axis} {size}" for axis, size in candidate.plan.shape.items())
    name = f"{candidate.plan.name} ({axes})"
    if candidate.description is None:
        return f"{name:40} {candidate.why}"
    needs = f"needs {format_bytes(candidate.description.needed)} a device, sends {format_bytes(candidate.sent)}"
    return f"{name:40} {needs}{'; ' * bool(candidate.why)}{candidate.why}"
