"""Collectives: what one instruction of a compiled program sends between devices, or between host and device."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from mlax._jax import fused_op_names, path_of, scopes_of_op_name
from mlax.inspect._hlo import HOST, Computation, Instruction, Program, Shape

TO_DEVICE, TO_HOST, ON_HOST = "host to device", "device to host", "computed on the host"


class Event(NamedTuple):
    """One transfer, or as many of the same as a loop makes."""

    kind: str
    group: int  # how many devices take part; 1 for a copy between a device and its host
    parts: tuple[tuple[str, int], ...]  # the bytes of each layer that has a part in it
    sends: float  # what share of its bytes a device sends
    times: int = 1

    @property
    def bytes(self) -> int:
        """Of all parts, all times."""
        return self.times * sum(size for _, size in self.parts)


def dearest(branches: Iterable[list[Event]]) -> list[Event]:
    """The branch of a conditional that moves most."""
    return max(branches, key=lambda events: sum(event.bytes for event in events), default=[])


# What each device sends of n bytes in a ring of g devices. The bytes of a gather are those of what is gathered.
_SENDS = {
    "all-reduce": lambda g: 2 * (g - 1) / g,
    "all-gather": lambda g: (g - 1) / g,
    "reduce-scatter": lambda g: (g - 1) / g,
    "all-to-all": lambda g: (g - 1) / g,
    "ragged-all-to-all": lambda g: (g - 1) / g,
    "collective-permute": lambda g: 1.0,
    "collective-broadcast": lambda g: 1.0,
}


def events_of(program: Program, computation: Computation, instruction: Instruction) -> list[Event]:
    """The transfers that an instruction is: none as a rule; of a pair of start and done the start has them."""
    kind = instruction.opcode.removesuffix("-start")
    operands = [computation.instructions[name] for name in instruction.operands if name in computation.instructions]
    if kind in _SENDS:
        group = _group(program, instruction)
        moved = operands[:1] if kind == "ragged-all-to-all" else operands
        sizes = [each.bytes * (group if kind == "all-gather" else 1) for each in moved]
        return [Event(kind, group, _parts(computation, instruction, sizes), _SENDS[kind](group))]
    if _runs_on_host(instruction):
        results = _results(instruction, operands)
        copied = {ON_HOST: sum(each.bytes for each in (*operands, *results))}
    else:
        copied = _copied(program, instruction, operands)
    return [Event(kind, 1, ((_layer(computation, instruction), size),), 1.0) for kind, size in copied.items()]


def _group(program: Program, instruction: Instruction) -> int:
    """The number of devices that a collective brings together, in each of the ways in which XLA writes that."""
    pairs = instruction.attributes.get("source_target_pairs")
    if pairs is not None:
        return len(set(re.findall(r"\d+", pairs)))
    written = instruction.attributes.get("replica_groups", "")
    if written.startswith("mesh"):  # mesh['data'=2,'model'=4] {'data'}, maybe with the order of the devices in between
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", written))
        _, _, axes = f"{written} {instruction.attributes.get('device_ids', '')}".rpartition("{")
        chosen = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", axes)
        return math.prod(int(part or sizes[axis]) for axis, part in chosen)
    if listed := re.match(r"\{\{([\d, ]*)\}", written):  # {{0,1},{2,3}}
        return len(re.findall(r"\d+", listed[1]))
    if counted := re.match(r"\[(\d+),(\d+)\]<=", written):  # [4,2]<=[8]: four groups of two
        return int(counted[2])
    return program.devices  # {}: all of them


def _parts(computation: Computation, instruction: Instruction, sizes: list[int]) -> tuple[tuple[str, int], ...]:
    """Whose the bytes are: XLA makes one collective of many, and keeps the names of all of them, or of one."""
    names = fused_op_names(instruction.op_name)
    if len(sizes) == 1:
        return ((_layer(computation, instruction), sizes[0]),)
    if len(names) == len(sizes):
        layers = [path_of(scopes_of_op_name(name)) for name in names]
    else:
        makers = [computation.instructions.get(name, instruction) for name in instruction.operands]
        layers = [_layer(computation, each) or _layer(computation, instruction) for each in makers]
    return tuple(zip(layers, sizes, strict=False))


def _layer(computation: Computation, instruction: Instruction) -> str:
    """The path of the layer that it belongs to: its own name tells, or that of what it is made of or used by."""
    for step in (_maker, _user):
        current: Instruction | None = instruction
        for _ in range(8):  # steps away, at most
            if current is None:
                break
            if _tells(current.op_name):
                return path_of(scopes_of_op_name(fused_op_names(current.op_name)[0]))
            current = step(computation, current)
    return ""


def _tells(name: str) -> bool:
    """An argument's name tells nothing, and a scan takes slices of its weights before any layer asks for them."""
    return "/" in name and "/while/body/jit(dynamic_index_in_dim)" not in name


def _maker(computation: Computation, instruction: Instruction) -> Instruction | None:
    return computation.instructions.get(next(iter(instruction.operands), ""))


def _user(computation: Computation, instruction: Instruction) -> Instruction | None:
    return next((each for each in computation.instructions.values() if instruction.name in each.operands), None)


def _runs_on_host(instruction: Instruction) -> bool:
    attributes = instruction.attributes
    on_host = '_xla_compute_type="host"' in attributes.get("frontend_attributes", "")
    is_call = instruction.opcode in ("call", "call-start", "async-start", "custom-call")
    return is_call and (on_host or attributes.get("async_execution_thread") == '"host"')


_MARKED = {"MoveToHost": TO_HOST, "MoveToDevice": TO_DEVICE}
# These hand on what is there already, wherever it lies.
_HANDING_ON = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "custom-call"),
    *("optimization-barrier", "after-all", "async-start", "async-update", "async-done", "partition-id"),
)


def _copied(program: Program, instruction: Instruction, operands: list[Instruction]) -> dict[str, int]:
    """The bytes that go from host to device or back, by direction: where result and operands lie tells."""
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    if target == "annotate_device_placement":
        placement = re.search(r'_xla_buffer_placement="(\w+)"', instruction.attributes.get("frontend_attributes", ""))
        target = "MoveToHost" if placement and "host" in placement[1] else "MoveToDevice"
    if target in _MARKED:
        return {_MARKED[target]: instruction.bytes}
    if instruction.opcode in _HANDING_ON or instruction.opcode.endswith("-done"):
        return {}
    arrays = [shape for each in operands for shape in each.shapes if shape.dims] or [
        shape for each in operands for shape in each.shapes
    ]
    return _between(arrays, _results(instruction, operands), _written(program, instruction, operands))


def _between(sources: list[Shape], results: tuple[Shape, ...], written: int | None) -> dict[str, int]:
    found: dict[str, int] = {}
    for shape in results:
        kind = TO_HOST if shape.space == HOST else TO_DEVICE
        if any((source.space == HOST) != (shape.space == HOST) for source in sources):
            found[kind] = found.get(kind, 0) + (shape.bytes if written is None else written)
    return found


def _results(instruction: Instruction, operands: list[Instruction]) -> tuple[Shape, ...]:
    """What it gives in the end: a start gives its operands along with that."""
    if instruction.opcode == "copy-start":
        return instruction.shapes[:1]
    if instruction.opcode.endswith("-start"):
        taken = sum(len(each.shapes) for each in operands)
        return instruction.shapes[taken : taken + 1]
    return instruction.shapes


def _written(program: Program, instruction: Instruction, operands: list[Instruction]) -> int | None:
    """The bytes of the slice that is written into an array, which is all that moves; None if this is no such thing."""
    if instruction.opcode == "fusion":
        inside = program.computations[instruction.called[0]]
        root = inside.root
        operands = [inside.instructions[name] for name in root.operands if name in inside.instructions]
    else:
        root = instruction
    return operands[1].bytes if root.opcode.startswith("dynamic-update-slice") else None
