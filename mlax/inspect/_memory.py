"""memory: the bytes that are live over a compiled program, and which layers hold them at the peak."""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mlax._jax import fused_op_names, path_of, scopes_of_op_name
from mlax.core import Documented, align_columns, document_tuple, format_bytes
from mlax.inspect._compile import trace_and_compile
from mlax.inspect._hlo import Computation, Instruction, Program, parse_hlo

PASSES_THROUGH = ("bitcast", "optimization-barrier", "while", "copy-done", "add-dependency")
UPDATES = ("dynamic-update-slice", "scatter")  # in place
ACTIVATIONS, OTHERS = "activations", "temporaries"


@document_tuple
class LiveBuffers(NamedTuple):
    """What a layer holds at the peak."""

    path: str  # of the layer that computed it; "" outside of a layer
    kind: str  # "activations", computed in the forward pass of a gradient, or "temporaries"
    bytes: int  # on one device


@document_tuple
class Moment(NamedTuple):
    """The memory in use while an operation runs."""

    path: str  # of the layer; "" outside of a layer
    operation: str  # the HLO opcode
    bytes: int  # of temporaries and results, without the arguments


@dataclasses.dataclass(frozen=True, repr=False)
class Memory(metaclass=Documented):
    """The memory of a compiled function on one device; `print` shows it as a table and a curve."""

    arguments: int  # bytes
    results: int  # bytes
    temporaries: int  # by XLA's own analysis: what is allocated besides arguments and results
    reused: int  # bytes of results that are written to donated arguments
    timeline: tuple[Moment, ...]  # in the order of the schedule; a loop at its own peak
    peak: Moment  # the moment of the timeline with the most bytes
    at_peak: tuple[LiveBuffers, ...]  # the largest first
    batched: int | None  # bytes at the peak that grow with the batch; None if `batch` was not passed

    @property
    def total(self) -> int:
        """The bytes that the function needs in all."""
        return self.arguments + self.results - self.reused + self.temporaries

    def __str__(self) -> str:
        where = f"in {self.peak.path}" if self.peak.path else "outside of any layer"
        parts = [
            f"{format_bytes(self.total)}: arguments {format_bytes(self.arguments)}, "
            f"results {format_bytes(self.results)} ({format_bytes(self.reused)} in donated arguments), "
            f"temporaries {format_bytes(self.temporaries)}",
            _curve([moment.bytes for moment in self.timeline]),
            f"the peak is {where} ({self.peak.operation}), when these are live:",
        ]
        rows = [(each.path or "(no layer)", each.kind, format_bytes(each.bytes)) for each in self.at_peak]
        kept = collections.Counter[str]()
        for each in self.at_peak:
            if each.kind == ACTIVATIONS and each.path:
                kept[each.path.split("/")[0]] += each.bytes
        advice = [
            f"rematerializing {name} (mlax.Remat, mode='remat' of a Repeat, or jax.checkpoint) would save up to "
            f"{format_bytes(size)}"
            for name, size in kept.most_common(1)
        ]
        if self.batched is not None:
            advice.append(f"half the batch would save about {format_bytes(self.batched / 2)}")
        return "\n".join([*parts, *(f"  {line}" for line in align_columns(rows, right=(2,))), *advice])

    __repr__ = __str__


def memory(function: Any, *args: Any, batch: int | None = None, **kwargs: Any) -> Memory:
    """Compile `function(*args, **kwargs)` and find when it needs most memory, and which layers hold it; nothing is run.

    `function` may be a `train.step`, and the arguments `jax.ShapeDtypeStruct`s. `batch` is the batch size: buffers with
    an axis of that size are taken to grow with it. The sizes are those of one device. Temporaries are XLA's own number;
    which buffers are live when is read from the schedule of the program, so the curve may differ from it a little.
    """
    _, compiled = trace_and_compile("memory", function, args, kwargs)
    return memory_of(compiled, batch)


def memory_of(compiled: Any, batch: int | None = None) -> Memory:
    """The memory of a compiled function."""
    analysis = compiled.memory_analysis()
    program = parse_hlo(compiled.as_text() or "")
    snapshots = list(_snapshots(program, program.computations[program.entry]))
    peak = _peak(snapshots)
    rows = collections.Counter[tuple[str, str]]()
    for buffer in peak.buffers:
        rows[buffer.path, buffer.kind] += buffer.bytes
    return Memory(
        arguments=analysis.argument_size_in_bytes,
        results=analysis.output_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        reused=analysis.alias_size_in_bytes,
        timeline=tuple(each.moment for each in snapshots),
        peak=peak.moment,
        at_peak=tuple(LiveBuffers(path, kind, size) for (path, kind), size in rows.most_common()),
        batched=None if batch is None else sum(each.bytes for each in peak.buffers if batch in each.dims),
    )


class _Buffer(NamedTuple):
    """A buffer that an instruction allocates."""

    owner: str  # the instruction
    index: int  # in its results
    bytes: int
    dims: tuple[int, ...]
    path: str
    kind: str


Results = list[_Buffer | None]  # one for each array; None for arguments and constants, which are counted elsewhere


class _Snapshot(NamedTuple):
    """The buffers that are live while an operation runs."""

    moment: Moment
    buffers: tuple[_Buffer, ...]


def _peak(snapshots: Iterable[_Snapshot]) -> _Snapshot:
    return max(snapshots, key=lambda each: each.moment.bytes, default=_Snapshot(Moment("", "", 0), ()))


def _snapshots(program: Program, computation: Computation) -> Iterator[_Snapshot]:
    """The live buffers at each instruction of a scheduled computation that allocates any."""
    instructions = list(computation.instructions.values())
    results = _allocate(program, computation)
    last_use = {
        buffer: position
        for position, each in enumerate(instructions)
        for name in each.operands
        for buffer in results.get(name, ())
    } | {buffer: len(instructions) for buffer in results[computation.root.name]}
    live: dict[_Buffer, None] = {}
    for position, each in enumerate(instructions):
        new = [buffer for buffer in results[each.name] if buffer is not None and buffer.owner == each.name]
        dying = [buffer for buffer in live if last_use.get(buffer, 0) <= position]
        for buffer in _overwritten(each, new, dying):
            del live[buffer]
        live.update(dict.fromkeys(new))
        buffers = (*live, *_peak(_inner_snapshots(program, each)).buffers)
        if len(buffers) > len(live) or new:
            yield _Snapshot(Moment(_path(each), each.opcode, sum(buffer.bytes for buffer in buffers)), buffers)
        for buffer in dying:
            live.pop(buffer, None)


def _allocate(program: Program, computation: Computation) -> dict[str, Results]:
    """The buffers of the results of each instruction."""
    results: dict[str, Results] = {}
    writers = _loop_writers(program, computation)
    for each in computation.instructions.values():
        operands = [results[name] for name in each.operands if name in results]
        source = _updated_operand(program, each)
        if each.opcode in ("parameter", "constant"):
            results[each.name] = [None] * len(each.shapes)
        elif each.opcode == "tuple":
            results[each.name] = list(itertools.chain(*operands))
        elif each.opcode == "get-tuple-element":
            results[each.name] = operands[0][int(each.attributes["index"]) :][: len(each.shapes)]
        elif each.opcode.endswith("-done"):  # of an asynchronous instruction: (operands, results, more)
            start = computation.instructions[each.operands[0]]
            first = sum(len(results[name]) for name in start.operands if name in results)
            results[each.name] = operands[0][first:][: len(each.shapes)]
        elif each.opcode.endswith("-start"):
            passed = list(itertools.chain(*operands))
            made = _new_buffers(each, len(passed), writers) if source is None else operands[source]
            results[each.name] = [*passed, *made]
        elif source is not None and operands:
            results[each.name] = operands[source]
        else:
            results[each.name] = _new_buffers(each, 0, writers)
    return results


def _new_buffers(each: Instruction, first: int, writers: Mapping[tuple[str, int], Instruction]) -> Results:
    """The buffers that an instruction allocates for its results, from the first of its shapes that is one."""
    buffers: Results = []
    for i, shape in enumerate(each.shapes[first:]):
        writer = writers.get((each.name, i), each)
        kind = ACTIVATIONS if _is_forward(writer) else OTHERS
        buffers.append(_Buffer(each.name, i, shape.bytes, shape.dims, _path(writer), kind) if shape.bytes else None)
    return buffers


def _loop_writers(program: Program, computation: Computation) -> dict[tuple[str, int], Instruction]:
    """For each result, (name, index), that a loop updates: the instruction in its body that writes to it."""
    writers: dict[tuple[str, int], Instruction] = {}
    for loop in computation.instructions.values():
        if loop.opcode == "while":
            body = program.computations[loop.attributes["body"].removeprefix("%")]
            carry = computation.instructions.get(loop.operands[0])
            if carry is not None and carry.opcode == body.root.opcode == "tuple":
                for name, writer in zip(carry.operands, body.root.operands, strict=True):
                    written = body.instructions[writer]
                    if written.op_name and written.opcode != "get-tuple-element":  # which passes it on unchanged
                        writers[_allocation(computation, name)] = written
    return writers


def _allocation(computation: Computation, name: str) -> tuple[str, int]:
    """The instruction that allocates a value, and the index of the value in its results."""
    index, each = 0, computation.instructions.get(name)
    while each is not None and each.opcode in ("get-tuple-element", "bitcast"):
        index = int(each.attributes["index"]) if each.opcode == "get-tuple-element" else index
        name = each.operands[0]
        each = computation.instructions.get(name)
    return name, index


def _updated_operand(program: Program, each: Instruction) -> int | None:
    """The operand whose buffers an instruction passes on or updates in place; None if it allocates its results."""
    if each.opcode in (*PASSES_THROUGH, *UPDATES):
        return 0
    if each.opcode in ("fusion", "fusion-start") and each.called:
        fused = program.computations[each.called[0]]
        root = fused.root
        while root.opcode == "bitcast":
            root = fused.instructions[root.operands[0]]
        target = fused.instructions.get(root.operands[0]) if root.opcode in UPDATES else None
        if target is not None and target.opcode == "parameter":
            return int(target.operands[0])
    return None


def _overwritten(each: Instruction, new: list[_Buffer], dying: list[_Buffer]) -> list[_Buffer]:
    """The buffers that are read for the last time, and that the results of a loop fusion are written to."""
    if each.opcode != "fusion" or "kLoop" not in each.attributes.get("kind", ""):
        return []
    free = list(dying)
    overwritten = []
    for buffer in new:
        match = next((old for old in free if old.bytes == buffer.bytes), None)
        if match is not None:
            free.remove(match)
            overwritten.append(match)
    return overwritten


def _inner_snapshots(program: Program, each: Instruction) -> Iterator[_Snapshot]:
    """Those of the computations that an instruction runs."""
    if each.opcode in ("while", "conditional", "call"):
        for name in each.called:
            yield from _snapshots(program, program.computations[name])


def _path(each: Instruction) -> str:
    return path_of(scopes_of_op_name(_first_name(each)))


def _is_forward(each: Instruction) -> bool:
    """Whether an instruction is part of the forward pass of a function that is differentiated."""
    scopes = scopes_of_op_name(_first_name(each))
    names = {scope.name for scope in scopes if scope.is_transformation}
    return "jvp" in names and "transpose" not in names


def _first_name(each: Instruction) -> str:
    return fused_op_names(each.op_name.partition(";")[0])[0]  # a fusion may have the names of several operations


def _curve(sizes: Sequence[int], width: int = 72) -> str:
    """The live bytes over the program as one line of bars."""
    if not sizes:
        return ""
    bars = " ▁▂▃▄▅▆▇█"
    columns = [max(sizes[i * len(sizes) // width : (i + 1) * len(sizes) // width] or [0]) for i in range(width)]
    columns = columns if len(sizes) >= width else list(sizes)
    return "".join(bars[round((len(bars) - 1) * size / max(max(columns), 1))] for size in columns)
