"""transfers: what a compiled function sends between devices, and between host and device, by layer."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from mlax._jax import path_of, scopes_of_stack
from mlax.inspect._flops import sub_jaxprs
from mlax.inspect._hlo import (
    TO_DEVICE,
    TO_HOST,
    Event,
    Instruction,
    Program,
    instruction_events,
    most_expensive,
    parse_hlo,
)
from mlax.inspect._memory import format_bytes


class Transfer(NamedTuple):
    """All transfers of one kind that belong to one layer."""

    layer: str  # its path, like "blocks/mlp/up"; "" outside of any
    kind: str  # like "all-reduce", or "host to device"
    group: int  # how many devices take part in each; 1 for a copy between a device and its host
    count: int
    bytes: int  # of all of them together, as one device holds them: of a gather, what it has gathered
    sent: int  # of that, what each device sends, in a ring


class Transfers(NamedTuple):
    """What a compiled function sends; printed, it is a table."""

    rows: tuple[Transfer, ...]
    totals: tuple[Transfer, ...]  # one for each kind and group; what XLA made one of for several layers counts once
    events: tuple[Event, ...] = ()  # what the rows and totals count

    def __str__(self) -> str:
        if not self.rows:
            return "No collective, and no copy between host and device."
        head = ("layer", "kind", "devices", "count", "bytes", "sent by each")
        lines = [
            head,
            *map(_format_row, self.rows),
            *(_format_row(row._replace(layer="in all")) for row in self.totals),
        ]
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
    traced, compiled = _trace_and_compile(function, args)
    events = list(program_events(program := parse_hlo(compiled.as_text()), program.entry))
    if traced is not None and _platform(compiled) == "cpu":
        shardings = jax.tree.structure(traced.args_info).flatten_up_to(compiled.input_shardings)
        events = [event for event in events if event.kind not in (TO_DEVICE, TO_HOST)]
        events += jaxpr_transfers(traced.jaxpr, shardings)
    return summarize_events(events)


def summarize_events(events: Iterable[Event]) -> Transfers:
    """The rows and totals of these events, those that send most first."""
    rows: dict[tuple[str, str, int], list[float]] = {}
    totals: dict[tuple[str, str, int], list[float]] = {}
    events = tuple(events)
    for event in events:
        layers: dict[str, int] = {}
        for layer, size in event.parts:
            layers[layer] = layers.get(layer, 0) + size
        for layer, size in layers.items():
            _add_event(rows, (layer, event.kind, event.group), event, size)
        _add_event(totals, ("", event.kind, event.group), event, sum(layers.values()))
    return Transfers(_sorted_rows(rows), _sorted_rows(totals), events)


def _trace_and_compile(function: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """(what was traced, if that is known, and what was compiled)."""
    aot = getattr(function, "aot", None)
    if aot is not None:
        if not args and not aot.compiled:
            raise ValueError(f"transfers: {function} is not compiled yet; pass its arguments too: a state and a batch.")
        return aot.stages(*args)
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


def program_events(program: Program, name: str, *, fused: bool = False) -> Iterator[Event]:
    computation = program.computations[name]
    for instruction in computation.instructions.values():
        found = instruction_events(program, computation, instruction)
        yield from (event for event in found if not fused or event.group > 1)  # a fusion itself tells what it copies
        if instruction.opcode == "while":
            times = program.trips(instruction)
            for inner in program_events(program, instruction.called[0]):
                yield inner._replace(times=inner.times * (1 if times is None else times))
        elif instruction.opcode == "conditional":
            yield from most_expensive(list(program_events(program, branch)) for branch in instruction.called)
        elif instruction.opcode == "fusion" or not (found or instruction.opcode.endswith(("-done", "-update"))):
            yield from _called_events(program, instruction)


def _called_events(program: Program, instruction: Instruction) -> Iterator[Event]:
    for called in instruction.called:
        yield from program_events(program, called, fused=instruction.opcode == "fusion")


def _add_event(
    table: dict[tuple[str, str, int], list[float]], key: tuple[str, str, int], event: Event, size: int
) -> None:
    row = table.setdefault(key, [0, 0, 0.0])
    row[0] += event.times
    row[1] += event.times * size
    row[2] += event.times * size * event.sends


def _sorted_rows(table: dict[tuple[str, str, int], list[float]]) -> tuple[Transfer, ...]:
    rows = [
        Transfer(layer, kind, group, int(count), int(size), round(sent))
        for (layer, kind, group), (count, size, sent) in table.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.sent, row)))


def _format_row(row: Transfer) -> tuple[str, ...]:
    layer = row.layer or "(no layer)"
    return layer, row.kind, str(row.group), str(row.count), format_bytes(row.bytes), format_bytes(row.sent)


Shards = tuple[int, ...]  # in how many an array is cut, axis by axis


def jaxpr_transfers(jaxpr: Any, shardings: list[Any]) -> Iterator[Event]:
    """The copies of a traced function whose arguments have these shardings, or None where they are not known.

    An array whose cut is not known counts whole: that of a slice of an argument is, that of a result is not.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    cuts = {
        variable: _num_shards(sharding, variable.aval.shape)
        for variable, sharding in zip(jaxpr.invars, shardings, strict=True)
        if sharding is not None
    }
    yield from _walk_jaxpr(jaxpr, cuts, (), 1)


def _walk_jaxpr(jaxpr: Any, cuts: dict[Any, Shards], around: tuple[Any, ...], times: int) -> Iterator[Event]:
    for equation in jaxpr.eqns:
        scopes = (*around, *equation.source_info.name_stack.stack)
        if equation.primitive.name == "device_put":
            yield from _equation_copies(equation, cuts, scopes, times)
            continue
        repeated = times * equation.params["length"] if equation.primitive.name == "scan" else times
        inner = [getattr(body, "jaxpr", body) for body in sub_jaxprs(equation.params)]
        found = [list(_walk_jaxpr(body, _body_shards(equation, body, cuts), scopes, repeated)) for body in inner]
        yield from most_expensive(found) if equation.primitive.name == "cond" else itertools.chain(*found)


def _body_shards(equation: Any, body: Any, cuts: dict[Any, Shards]) -> dict[Any, Shards]:
    """What is known of the arguments of a body that an equation runs."""
    if equation.primitive.name == "shard_map":  # its body sees the pieces
        return {}
    given = equation.invars[1:] if equation.primitive.name == "cond" else equation.invars  # the first chooses
    if len(given) != len(body.invars):
        return {}
    pairs = [(inner, outer, _known_shards(outer, cuts)) for inner, outer in zip(body.invars, given, strict=True)]
    # A scan takes slices: its body sees one axis less.
    return {inner: cut[outer.aval.ndim - inner.aval.ndim :] for inner, outer, cut in pairs if cut is not None}


def _known_shards(variable: Any, cuts: dict[Any, Shards]) -> Shards | None:
    return None if hasattr(variable, "val") else cuts.get(variable)  # a literal has a value, and no hash


def _equation_copies(equation: Any, cuts: dict[Any, Shards], scopes: tuple[Any, ...], times: int) -> Iterator[Event]:
    path = path_of(scopes_of_stack(scopes))
    for source, result, target in zip(equation.invars, equation.outvars, equation.params["devices"], strict=True):
        before, after = (_is_host(each.aval) for each in (source, result))
        if before != after:
            whole = result.aval.size * result.aval.dtype.itemsize
            placed = hasattr(target, "shard_shape")
            cut = _num_shards(target, result.aval.shape) if placed else _known_shards(source, cuts)
            size = whole // math.prod(cut or ())
            yield Event(TO_HOST if after else TO_DEVICE, 1, ((path, size),), 1.0, times)


def _num_shards(sharding: Any, shape: tuple[int, ...]) -> Shards:
    pieces = zip(shape, sharding.shard_shape(shape), strict=True)
    return tuple(whole // piece if piece else 1 for whole, piece in pieces)


def _is_host(aval: Any) -> bool:
    return getattr(getattr(aval, "memory_space", None), "name", "") == "Host"
