"""transfers: what a compiled function sends between devices, and between host and device, layer by layer."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from mlax.inspect._asked import asked
from mlax.inspect._collectives import TO_DEVICE, TO_HOST, Event, dearest, events_of
from mlax.inspect._hlo import Instruction, Program, read
from mlax.inspect._sizes import gib


class Row(NamedTuple):
    """All transfers of one kind that belong to one layer."""

    layer: str  # its path, like "blocks/mlp/up"; "" outside of any
    kind: str  # like "all-reduce", or "host to device"
    group: int  # how many devices take part in each; 1 for a copy between a device and its host
    count: int
    bytes: int  # of all of them together, as one device holds them: of a gather, what it has gathered
    sent: int  # of that, what each device sends, in a ring


class Transfers(NamedTuple):
    """What a compiled function sends; printed, it is a table."""

    rows: tuple[Row, ...]
    totals: tuple[Row, ...]  # one for each kind and group; what XLA made one of for several layers counts once
    events: tuple[Event, ...] = ()  # what the rows and totals count

    def __str__(self) -> str:
        if not self.rows:
            return "No collective, and no copy between host and device."
        head = ("layer", "kind", "devices", "count", "bytes", "sent by each")
        lines = [head, *map(_cells, self.rows), *(_cells(row._replace(layer="in all")) for row in self.totals)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        if sum(row.count for row in self.rows) > sum(row.count for row in self.totals):
            shown.append("What several layers share counts in the row of each of them, and once in all.")
        return "\n".join(shown)


def transfers(function: Any, *args: Any) -> Transfers:
    """Count the collectives and the copies between host and device of a function, as XLA compiled it.

    `function` is one to compile for `args`, arrays or `jax.ShapeDtypeStruct`s with shardings, or a `train.step`; or,
    without any `args`, what `jax.jit(f).lower(...).compile()` gave, or a step that has been compiled already.

    What is in a loop counts as often as the loop runs, or once if nobody knows how often; of a conditional the branch
    counts that sends most. A collective that XLA made of those of several layers counts in the row of each of them.
    On a CPU host and device share their memory and XLA copies nothing; there the copies that the function asks for are
    counted, if there is a function to ask: of one that was compiled by `lower().compile()` nobody can tell any more.
    """
    traced, compiled = _compiled(function, args)
    events = list(_events(program := read(compiled.as_text()), program.entry))
    if traced is not None and _platform(compiled) == "cpu":
        shardings = jax.tree.structure(traced.args_info).flatten_up_to(compiled.input_shardings)
        events = [event for event in events if event.kind not in (TO_DEVICE, TO_HOST)]
        events += asked(traced.jaxpr, shardings)
    return collected(events)


def collected(events: Iterable[Event]) -> Transfers:
    """The rows and totals of these events, those that send most first."""
    rows: dict[tuple[str, str, int], list[float]] = {}
    totals: dict[tuple[str, str, int], list[float]] = {}
    events = tuple(events)
    for event in events:
        layers: dict[str, int] = {}
        for layer, size in event.parts:
            layers[layer] = layers.get(layer, 0) + size
        for layer, size in layers.items():
            _add(rows, (layer, event.kind, event.group), event, size)
        _add(totals, ("", event.kind, event.group), event, sum(layers.values()))
    return Transfers(_rows(rows), _rows(totals), events)


def _compiled(function: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """(what was traced, if that is known, and what was compiled)."""
    once = getattr(function, "once", None)
    if once is not None:
        if not args and not once.compiled:
            raise ValueError(f"transfers: {function} is not compiled yet; pass its arguments too: a state and a batch.")
        return once.program(*args)
    if hasattr(function, "as_text"):
        if args:
            raise TypeError("transfers: what is compiled already takes no arguments; pass it alone.")
        return None, function
    if not callable(function):
        raise TypeError(f"transfers: {function!r} is neither a function nor a compiled one.")
    jitted: Any = function if hasattr(function, "trace") else jax.jit(function)
    traced = jitted.trace(*args)
    return traced, traced.lower().compile()


def _platform(compiled: Any) -> str:
    shardings = [each for each in jax.tree.leaves(compiled.input_shardings) if hasattr(each, "device_set")]
    return next(iter(shardings[0].device_set)).platform if shardings else jax.default_backend()


def _events(program: Program, name: str, *, fused: bool = False) -> Iterator[Event]:
    computation = program.computations[name]
    for instruction in computation.instructions.values():
        found = events_of(program, computation, instruction)
        yield from (event for event in found if not fused or event.group > 1)  # a fusion itself tells what it copies
        if instruction.opcode == "while":
            times = program.trips(instruction)
            for inner in _events(program, instruction.called[0]):
                yield inner._replace(times=inner.times * (1 if times is None else times))
        elif instruction.opcode == "conditional":
            yield from dearest(list(_events(program, branch)) for branch in instruction.called)
        elif instruction.opcode == "fusion" or not (found or instruction.opcode.endswith(("-done", "-update"))):
            yield from _inside(program, instruction)


def _inside(program: Program, instruction: Instruction) -> Iterator[Event]:
    for called in instruction.called:
        yield from _events(program, called, fused=instruction.opcode == "fusion")


def _add(table: dict[tuple[str, str, int], list[float]], key: tuple[str, str, int], event: Event, size: int) -> None:
    row = table.setdefault(key, [0, 0, 0.0])
    row[0] += event.times
    row[1] += event.times * size
    row[2] += event.times * size * event.sends


def _rows(table: dict[tuple[str, str, int], list[float]]) -> tuple[Row, ...]:
    rows = [
        Row(layer, kind, group, int(count), int(size), round(sent))
        for (layer, kind, group), (count, size, sent) in table.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.sent, row)))


def _cells(row: Row) -> tuple[str, ...]:
    layer = row.layer or "(no layer)"
    return layer, row.kind, str(row.group), str(row.count), gib(row.bytes), gib(row.sent)
