"""transfers: what a compiled function sends between devices, and between host and device, by layer."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from mlax._jax import path_of, scopes_of_stack
from mlax.core import align_columns, document_tuple, format_bytes
from mlax.inspect._compile import trace_and_compile
from mlax.inspect._flops import sub_jaxprs
from mlax.inspect._hlo import Instruction, Program, parse_hlo
from mlax.inspect._transfer_events import TO_DEVICE, TO_HOST, TransferEvent, instruction_events, most_expensive

TO_CALLBACK, FROM_CALLBACK = "device to callback", "callback to device"
CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print")  # primitives


@document_tuple
class Transfer(NamedTuple):
    """All transfers of one kind that belong to one layer."""

    layer: str  # its path, such as "blocks/mlp/up"; "" outside any layer
    kind: str  # such as "all-reduce" or "host to device"
    group: int  # the number of devices that take part in each; 1 for a host-device copy
    count: int  # how many
    bytes: int  # of all of them, on one device; for an all-gather, of the result
    sent: int  # the bytes that each device sends, in a ring


@document_tuple
class Transfers(NamedTuple):
    """The transfers of a compiled function; printed, they are a table."""

    rows: tuple[Transfer, ...]  # by layer and kind
    totals: tuple[Transfer, ...]  # by kind and group; a collective of several layers counts once
    events: tuple[TransferEvent, ...] = ()  # the single transfers that the rows and totals sum up

    def __str__(self) -> str:
        if not self.rows:
            return "No collectives and no host-device copies."
        head = ("layer", "kind", "devices", "count", "bytes", "sent per device")
        lines = [
            head,
            *map(_format_row, self.rows),
            *(_format_row(row._replace(layer="total")) for row in self.totals),
        ]
        shown = align_columns(lines, right=range(2, len(head)))
        if sum(row.count for row in self.rows) > sum(row.count for row in self.totals):
            shown.append("A collective of several layers counts in the row of each of them, and once in the total.")
        return "\n".join(shown)

    def __repr__(self) -> str:
        return str(self)  # so that it need not be printed in a notebook


def transfers(function: Any, *args: Any) -> Transfers:
    """The collectives and host-device copies of a function as XLA compiled it, by layer.

    `function` is a function to compile for `args`, arrays or `jax.ShapeDtypeStruct`s with shardings, or a `train.step`;
    or, without `args`, the result of `jax.jit(f).lower(...).compile()`, or a step that is already compiled.

    What is in a loop counts as often as the loop runs, or once if that is unknown; of a conditional the branch counts
    that transfers most. A collective that XLA combined from several layers counts in the row of each of them. Callbacks
    to Python, `jax.debug.print` too, transfer their arguments and results. On a CPU host and device share their memory
    and XLA copies nothing; there the copies in the jaxpr are counted. The result of `lower().compile()` has neither.
    """
    traced, compiled = trace_and_compile("transfers", function, args, {})
    events = list(program_events(program := parse_hlo(compiled.as_text()), program.entry))
    if traced is not None:
        shardings = jax.tree.structure(traced.args_info).flatten_up_to(compiled.input_shardings)
        found = list(jaxpr_transfers(traced.jaxpr, shardings))
        events += [event for event in found if event.kind in (TO_CALLBACK, FROM_CALLBACK)]
        if _platform(compiled) == "cpu":
            events = [event for event in events if event.kind not in (TO_DEVICE, TO_HOST)]
            events += [event for event in found if event.kind in (TO_DEVICE, TO_HOST)]
    return summarize_events(events)


def summarize_events(events: Iterable[TransferEvent]) -> Transfers:
    """The rows and totals of these events, those that send the most bytes first."""
    rows: dict[Key, list[float]] = {}
    totals: dict[Key, list[float]] = {}
    events = tuple(events)
    for event in events:
        layers: dict[str, int] = {}
        for layer, size in event.bytes_by_layer:
            layers[layer] = layers.get(layer, 0) + size
        for layer, size in layers.items():
            _add_event(rows, (layer, event.kind, event.group), event, size)
        _add_event(totals, ("", event.kind, event.group), event, sum(layers.values()))
    return Transfers(_sorted_rows(rows), _sorted_rows(totals), events)


def _platform(compiled: Any) -> str:
    shardings = [each for each in jax.tree.leaves(compiled.input_shardings) if hasattr(each, "device_set")]
    return next(iter(shardings[0].device_set)).platform if shardings else jax.default_backend()


def program_events(program: Program, name: str, *, fused: bool = False) -> Iterator[TransferEvent]:
    """The transfers of the computation of this name and of those that it calls."""
    computation = program.computations[name]
    for instruction in computation.instructions.values():
        found = instruction_events(program, computation, instruction)
        yield from (event for event in found if not fused or event.group > 1)  # the copies of a fusion are counted once
        if instruction.opcode == "while":
            times = program.trip_count(instruction)
            for inner in program_events(program, instruction.called[0]):
                yield inner._replace(times=inner.times * (1 if times is None else times))
        elif instruction.opcode == "conditional":
            yield from most_expensive(list(program_events(program, branch)) for branch in instruction.called)
        elif instruction.opcode == "fusion" or not (found or instruction.opcode.endswith(("-done", "-update"))):
            yield from _called_events(program, instruction)


def _called_events(program: Program, instruction: Instruction) -> Iterator[TransferEvent]:
    for called in instruction.called:
        yield from program_events(program, called, fused=instruction.opcode == "fusion")


Key = tuple[str, str, int]  # layer, kind and group


def _add_event(table: dict[Key, list[float]], key: Key, event: TransferEvent, size: int) -> None:
    row = table.setdefault(key, [0, 0, 0.0])
    row[0] += event.times
    row[1] += event.times * size
    row[2] += event.times * size * event.sent_fraction


def _sorted_rows(table: dict[Key, list[float]]) -> tuple[Transfer, ...]:
    rows = [
        Transfer(layer, kind, group, int(count), int(size), round(sent))
        for (layer, kind, group), (count, size, sent) in table.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.sent, row)))


def _format_row(row: Transfer) -> tuple[str, ...]:
    layer = row.layer or "(no layer)"
    return layer, row.kind, str(row.group), str(row.count), format_bytes(row.bytes), format_bytes(row.sent)


Shards = tuple[int, ...]  # the number of shards of each axis of an array


def jaxpr_transfers(jaxpr: Any, shardings: list[Any]) -> Iterator[TransferEvent]:
    """The host-device copies of a traced function whose arguments have these shardings; None where unknown.

    The shards of an argument, and of a slice of it, are known; an array whose shards are not known counts in full.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    shards = {
        variable: _shards(sharding, variable.aval.shape)
        for variable, sharding in zip(jaxpr.invars, shardings, strict=True)
        if sharding is not None
    }
    yield from _walk_jaxpr(jaxpr, shards, (), 1)


def _walk_jaxpr(jaxpr: Any, shards: dict[Any, Shards], scopes: tuple[Any, ...], times: int) -> Iterator[TransferEvent]:
    for equation in jaxpr.eqns:
        inner_scopes = (*scopes, *equation.source_info.name_stack.stack)
        if equation.primitive.name == "device_put":
            yield from _equation_copies(equation, shards, inner_scopes, times)
            continue
        if equation.primitive.name in CALLBACKS:
            yield from _callback_copies(equation, inner_scopes, times)
        inner_times = times * equation.params["length"] if equation.primitive.name == "scan" else times
        bodies = [getattr(body, "jaxpr", body) for body in sub_jaxprs(equation.params)]
        found = [
            list(_walk_jaxpr(body, _body_shards(equation, body, shards), inner_scopes, inner_times)) for body in bodies
        ]
        yield from most_expensive(found) if equation.primitive.name == "cond" else itertools.chain(*found)


def _body_shards(equation: Any, body: Any, shards: dict[Any, Shards]) -> dict[Any, Shards]:
    """The shards of the arguments of a jaxpr that an equation runs, as far as they are known."""
    if equation.primitive.name == "shard_map":  # its body sees single shards
        return {}
    arguments = equation.invars[1:] if equation.primitive.name == "cond" else equation.invars  # the first is the index
    if len(arguments) != len(body.invars):
        return {}
    known = [(inner, outer, _known_shards(outer, shards)) for inner, outer in zip(body.invars, arguments, strict=True)]
    # the body of a scan sees slices, which lack the leading axis
    return {inner: each[outer.aval.ndim - inner.aval.ndim :] for inner, outer, each in known if each is not None}


def _known_shards(variable: Any, shards: dict[Any, Shards]) -> Shards | None:
    return None if hasattr(variable, "val") else shards.get(variable)  # literals are not hashable


def _equation_copies(
    equation: Any, shards: dict[Any, Shards], scopes: tuple[Any, ...], times: int
) -> Iterator[TransferEvent]:
    """The copies of a `device_put` equation that cross between host and device memory."""
    path = path_of(scopes_of_stack(scopes))
    for source, result, target in zip(equation.invars, equation.outvars, equation.params["devices"], strict=True):
        from_host, to_host = _is_host(source.aval), _is_host(result.aval)
        if from_host != to_host:
            has_sharding = hasattr(target, "shard_shape")
            known = _shards(target, result.aval.shape) if has_sharding else _known_shards(source, shards)
            size = result.aval.size * result.aval.dtype.itemsize // math.prod(known or ())
            yield TransferEvent(TO_HOST if to_host else TO_DEVICE, 1, ((path, size),), 1.0, times)


def _callback_copies(equation: Any, scopes: tuple[Any, ...], times: int) -> Iterator[TransferEvent]:
    """What a callback to Python reads and returns."""
    path = path_of(scopes_of_stack(scopes))
    for kind, variables in ((TO_CALLBACK, equation.invars), (FROM_CALLBACK, equation.outvars)):
        avals = [each.aval for each in variables if hasattr(each.aval, "dtype") and not hasattr(each, "val")]
        if avals:
            yield TransferEvent(kind, 1, ((path, sum(each.size * each.dtype.itemsize for each in avals)),), 1.0, times)


def _shards(sharding: Any, shape: tuple[int, ...]) -> Shards:
    sizes = zip(shape, sharding.shard_shape(shape), strict=True)
    return tuple(size // shard if shard else 1 for size, shard in sizes)


def _is_host(aval: Any) -> bool:
    return getattr(getattr(aval, "memory_space", None), "name", "") == "Host"
