"""Copies between host and device that a function asks for, counted in its jaxpr.

A CPU's own memory is that of its host, so that XLA leaves all of them out; the jaxpr still has them.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from mlax._jax import path_of, scopes_of_stack
from mlax.inspect._collectives import TO_DEVICE, TO_HOST, Event, dearest
from mlax.inspect._flops import bodies

Pieces = tuple[int, ...]  # in how many an array is cut, axis by axis


def asked(jaxpr: Any, shardings: list[Any]) -> Iterator[Event]:
    """The copies of a traced function whose arguments have these shardings, or None where they are not known.

    An array whose cut is not known counts whole: that of a slice of an argument is, that of a result is not.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    cuts = {
        variable: _cut(sharding, variable.aval.shape)
        for variable, sharding in zip(jaxpr.invars, shardings, strict=True)
        if sharding is not None
    }
    yield from _walk(jaxpr, cuts, (), 1)


def _walk(jaxpr: Any, cuts: dict[Any, Pieces], around: tuple[Any, ...], times: int) -> Iterator[Event]:
    for equation in jaxpr.eqns:
        scopes = (*around, *equation.source_info.name_stack.stack)
        if equation.primitive.name == "device_put":
            yield from _copies(equation, cuts, scopes, times)
            continue
        repeated = times * equation.params["length"] if equation.primitive.name == "scan" else times
        inner = [getattr(body, "jaxpr", body) for body in bodies(equation.params)]
        found = [list(_walk(body, _inside(equation, body, cuts), scopes, repeated)) for body in inner]
        yield from dearest(found) if equation.primitive.name == "cond" else itertools.chain(*found)


def _inside(equation: Any, body: Any, cuts: dict[Any, Pieces]) -> dict[Any, Pieces]:
    """What is known of the arguments of a body that an equation runs."""
    if equation.primitive.name == "shard_map":  # its body sees the pieces
        return {}
    given = equation.invars[1:] if equation.primitive.name == "cond" else equation.invars  # the first chooses
    if len(given) != len(body.invars):
        return {}
    pairs = [(inner, outer, _of(outer, cuts)) for inner, outer in zip(body.invars, given, strict=True)]
    # A scan takes slices: its body sees one axis less.
    return {inner: cut[outer.aval.ndim - inner.aval.ndim :] for inner, outer, cut in pairs if cut is not None}


def _of(variable: Any, cuts: dict[Any, Pieces]) -> Pieces | None:
    return None if hasattr(variable, "val") else cuts.get(variable)  # a literal has a value, and no hash


def _copies(equation: Any, cuts: dict[Any, Pieces], scopes: tuple[Any, ...], times: int) -> Iterator[Event]:
    path = path_of(scopes_of_stack(scopes))
    for source, result, target in zip(equation.invars, equation.outvars, equation.params["devices"], strict=True):
        before, after = (_is_host(each.aval) for each in (source, result))
        if before != after:
            whole = result.aval.size * result.aval.dtype.itemsize
            placed = hasattr(target, "shard_shape")
            cut = _cut(target, result.aval.shape) if placed else _of(source, cuts)
            size = whole // math.prod(cut or ())
            yield Event(TO_HOST if after else TO_DEVICE, 1, ((path, size),), 1.0, times)


def _cut(sharding: Any, shape: tuple[int, ...]) -> Pieces:
    pieces = zip(shape, sharding.shard_shape(shape), strict=True)
    return tuple(whole // piece if piece else 1 for whole, piece in pieces)


def _is_host(aval: Any) -> bool:
    return getattr(getattr(aval, "memory_space", None), "name", "") == "Host"
