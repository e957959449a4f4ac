"""The transfers of one HLO instruction: collectives and host-device copies, with their bytes and layers."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from mlax._jax import fused_op_names, path_of, scopes_of_op_name
from mlax.inspect._hlo import HOST_SPACE, Computation, Instruction, Program, Shape

TO_DEVICE, TO_HOST, ON_HOST = "host to device", "device to host", "computed on the host"


class TransferEvent(NamedTuple):
    """A transfer: one collective or host-device copy, or several equal ones in a loop."""

    kind: str
    group: int  # the number of devices that take part; 1 for a host-device copy
    bytes_by_layer: tuple[tuple[str, int], ...]
    sent_fraction: float  # of its bytes, by each device
    times: int = 1

    @property
    def bytes(self) -> int:
        """The bytes of all layers, all times."""
        return self.times * sum(size for _, size in self.bytes_by_layer)


def most_expensive(branches: Iterable[list[TransferEvent]]) -> list[TransferEvent]:
    """The events of the branch of a conditional that transfers most."""
    return max(branches, key=lambda events: sum(event.bytes for event in events), default=[])


# The fraction that each device sends in a ring of g devices: of the result of an all-gather, else of the operands.
_SENT_FRACTION = {
    "all-reduce": lambda g: 2 * (g - 1) / g,
    "all-gather": lambda g: (g - 1) / g,
    "reduce-scatter": lambda g: (g - 1) / g,
    "all-to-all": lambda g: (g - 1) / g,
    "ragged-all-to-all": lambda g: (g - 1) / g,
    "collective-permute": lambda g: 1.0,
    "collective-broadcast": lambda g: 1.0,
}


def instruction_events(program: Program, computation: Computation, instruction: Instruction) -> list[TransferEvent]:
    """The transfers of an instruction, usually none; of a start and done pair the start has them."""
    kind = instruction.opcode.removesuffix("-start")
    operands = [computation.instructions[name] for name in instruction.operands if name in computation.instructions]
    if kind in _SENT_FRACTION:
        group = _group_size(program, instruction)
        moved = operands[:1] if kind == "ragged-all-to-all" else operands
        sizes = [each.bytes * (group if kind == "all-gather" else 1) for each in moved]
        return [
            TransferEvent(kind, group, _bytes_by_layer(computation, instruction, sizes), _SENT_FRACTION[kind](group))
        ]
    if _runs_on_host(instruction):
        results = _final_results(instruction, operands)
        copied = {ON_HOST: sum(each.bytes for each in (*operands, *results))}
    else:
        copied = _host_copies(program, instruction, operands)
    return [
        TransferEvent(kind, 1, ((_layer_of(computation, instruction), size),), 1.0) for kind, size in copied.items()
    ]


def _group_size(program: Program, instruction: Instruction) -> int:
    """The number of devices in each group of a collective, in any of the notations of XLA."""
    pairs = instruction.attributes.get("source_target_pairs")
    if pairs is not None:
        return len(set(re.findall(r"\d+", pairs)))
    groups = instruction.attributes.get("replica_groups", "")
    if groups.startswith("mesh"):  # mesh['data'=2,'model'=4] {'data'}, possibly with device_ids in between
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", groups))
        _, _, axes = f"{groups} {instruction.attributes.get('device_ids', '')}".rpartition("{")
        chosen = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", axes)
        return math.prod(int(part or sizes[axis]) for axis, part in chosen)
    if listed := re.match(r"\{\{([\d, ]*)\}", groups):  # {{0,1},{2,3}}
        return len(re.findall(r"\d+", listed[1]))
    if counted := re.match(r"\[(\d+),(\d+)\]<=", groups):  # [4,2]<=[8]: four groups of two
        return int(counted[2])
    return program.devices  # {}: all of them


def _bytes_by_layer(
    computation: Computation, instruction: Instruction, sizes: list[int]
) -> tuple[tuple[str, int], ...]:
    """The bytes of each layer: XLA combines collectives, and keeps the op_names of all of them, or of one."""
    names = fused_op_names(instruction.op_name)
    if len(sizes) == 1:
        return ((_layer_of(computation, instruction), sizes[0]),)
    if len(names) == len(sizes):
        layers = [path_of(scopes_of_op_name(name)) for name in names]
    else:
        producers = [computation.instructions.get(name, instruction) for name in instruction.operands]
        layers = [_layer_of(computation, each) or _layer_of(computation, instruction) for each in producers]
    return tuple(zip(layers, sizes, strict=False))


def _layer_of(computation: Computation, instruction: Instruction) -> str:
    """The path of the layer of an instruction, by its op_name, or else by that of a producer or consumer nearby."""
    for step in (_producer, _consumer):
        current: Instruction | None = instruction
        for _ in range(8):  # steps at most
            if current is None:
                break
            if _names_layer(current.op_name):
                return path_of(scopes_of_op_name(fused_op_names(current.op_name)[0]))
            current = step(computation, current)
    return ""


def _names_layer(name: str) -> bool:
    """Whether an op_name contains a layer; those of arguments and of the slices that a scan takes do not."""
    return "/" in name and "/while/body/jit(dynamic_index_in_dim)" not in name


def _producer(computation: Computation, instruction: Instruction) -> Instruction | None:
    return computation.instructions.get(next(iter(instruction.operands), ""))


def _consumer(computation: Computation, instruction: Instruction) -> Instruction | None:
    return next((each for each in computation.instructions.values() if instruction.name in each.operands), None)


def _runs_on_host(instruction: Instruction) -> bool:
    attributes = instruction.attributes
    on_host = '_xla_compute_type="host"' in attributes.get("frontend_attributes", "")
    is_call = instruction.opcode in ("call", "call-start", "async-start", "custom-call")
    return is_call and (on_host or attributes.get("async_execution_thread") == '"host"')


_MOVE_DIRECTIONS = {"MoveToHost": TO_HOST, "MoveToDevice": TO_DEVICE}
# Instructions that pass on a buffer, in whichever memory it is.
_NO_COPY = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "custom-call"),
    *("optimization-barrier", "after-all", "async-start", "async-update", "async-done", "partition-id"),
)


def _host_copies(program: Program, instruction: Instruction, operands: list[Instruction]) -> dict[str, int]:
    """The bytes copied between host and device, by direction, from the memory spaces of operands and results."""
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    if target == "annotate_device_placement":
        placement = re.search(r'_xla_buffer_placement="(\w+)"', instruction.attributes.get("frontend_attributes", ""))
        target = "MoveToHost" if placement and "host" in placement[1] else "MoveToDevice"
    if target in _MOVE_DIRECTIONS:
        return {_MOVE_DIRECTIONS[target]: instruction.bytes}
    if instruction.opcode in _NO_COPY or instruction.opcode.endswith("-done"):
        return {}
    shapes = [shape for operand in operands for shape in operand.shapes]
    sources = [shape for shape in shapes if shape.dims] or shapes  # scalars, such as indices, only if there is no array
    slice_bytes = _updated_slice_bytes(program, instruction, operands)
    copied: dict[str, int] = {}
    for shape in _final_results(instruction, operands):
        direction = TO_HOST if shape.space == HOST_SPACE else TO_DEVICE
        if any((source.space == HOST_SPACE) != (shape.space == HOST_SPACE) for source in sources):
            copied[direction] = copied.get(direction, 0) + (shape.bytes if slice_bytes is None else slice_bytes)
    return copied


def _final_results(instruction: Instruction, operands: list[Instruction]) -> tuple[Shape, ...]:
    """The shapes of the actual results; those of a start include its operands."""
    if instruction.opcode == "copy-start":
        return instruction.shapes[:1]
    if instruction.opcode.endswith("-start"):
        first = sum(len(each.shapes) for each in operands)
        return instruction.shapes[first : first + 1]
    return instruction.shapes


def _updated_slice_bytes(program: Program, instruction: Instruction, operands: list[Instruction]) -> int | None:
    """The bytes that a dynamic-update-slice writes, which is all that is copied; None for other instructions."""
    if instruction.opcode == "fusion":
        fused = program.computations[instruction.called[0]]
        root = fused.root
        operands = [fused.instructions[name] for name in root.operands if name in fused.instructions]
    else:
        root = instruction
    return operands[1].bytes if root.opcode.startswith("dynamic-update-slice") else None
