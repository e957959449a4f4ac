"""stages: what JAX traced, lowered and compiled of a function, and what became of its arguments."""

import collections
import contextlib
import dataclasses
import inspect
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from mlax.core import Documented, count_of, document_tuple, format_bytes, signature
from mlax.inspect._compile import trace, trace_and_compile
from mlax.inspect._flops import sub_jaxprs
from mlax.inspect._hlo import Program, kernels, parse_hlo

LARGE = 1 << 20  # bytes of a constant that is worth a line


@document_tuple
class Donation(NamedTuple):
    """An argument whose buffer was donated, and whether a result is written to it."""

    name: str  # of the argument
    is_used: bool  # whether a result is written to it
    reason: str  # why not, or empty

    def __str__(self) -> str:
        return f"{self.name} is donated" + ("" if self.is_used else f", but its buffer is not used: {self.reason}")


@document_tuple
class Constant(NamedTuple):
    """An array that the function closes over, and that is part of the program."""

    name: str  # of the variable, or empty if it was not found
    signature: str  # dtype and shape
    bytes: int  # of the array

    def __str__(self) -> str:
        name = f"{self.name}, " if self.name else ""
        return f"{name}{self.signature}, {format_bytes(self.bytes)}: pass it as an argument"


@document_tuple
class Match(NamedTuple):
    """A line of a stage that has the text that was searched for."""

    stage: str  # "jaxpr", "stablehlo" or "hlo"
    line: int  # from 1
    text: str  # of the line


@dataclasses.dataclass(frozen=True, repr=False)
class Stages(metaclass=Documented):
    """The three stages of a function as text, and what became of its arguments; `print` shows an overview."""

    name: str  # of the function
    jaxpr: str  # as text
    stablehlo: str  # as text, without the elements of large constants
    hlo: str  # optimized, for the device
    arguments: Mapping[str, str]  # name: signature
    dropped: tuple[str, ...]  # arguments that no result depends on
    donations: tuple[Donation, ...]  # of arguments
    constants: tuple[Constant, ...]  # of at least 1 MiB
    side_effects: tuple[str, ...]  # that happened only while the function was traced
    kernels: Mapping[str, int]  # operations that run on the device, by HLO opcode; the body of a loop counts once

    def search(self, text: str) -> list[Match]:
        """The lines of all stages that contain a text, such as "dot_general" or the path of a layer."""
        stages = {"jaxpr": self.jaxpr, "stablehlo": self.stablehlo, "hlo": self.hlo}
        return [
            Match(stage, number, line.strip())
            for stage, lines in stages.items()
            for number, line in enumerate(lines.splitlines(), 1)
            if text in line
        ]

    def __str__(self) -> str:
        fusions = self.kernels.get("fusion", 0)
        lines = [
            f"{self.name}: {count_of(len(self.arguments), 'argument')}, "
            f"{count_of(sum(self.kernels.values()), 'kernel')}, {fusions} of them fusions",
            *(f"dropped: {name}, {self.arguments[name]}, since no result depends on it" for name in self.dropped),
            *map(str, self.donations),
            *(f"constant: {each}" for each in self.constants),
            *(f"only while tracing: {each}" for each in self.side_effects),
        ]
        sizes = {"jaxpr": self.jaxpr, "stablehlo": self.stablehlo, "hlo": self.hlo}
        lines.append("  ".join(f".{name} {text.count(chr(10)):,} lines" for name, text in sizes.items()))
        return "\n".join(lines)

    __repr__ = __str__


def stages(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Stages:
    """Trace, lower and compile `function(*args, **kwargs)`, and show what became of it; nothing is run.

    The arguments may be `jax.ShapeDtypeStruct`s. A jitted function keeps its options, such as `donate_argnums`; any
    other is jitted, with leaves that are not arrays as static.
    """
    side_effects = tuple(_observe_tracing(_plain(function), args, kwargs)) if callable(function) else ()
    with contextlib.redirect_stdout(io.StringIO()):  # a print that runs while tracing is in the result
        traced, compiled = trace_and_compile("stages", function, args, kwargs)
    if traced is None:
        raise TypeError("stages: a compiled function does not have the other stages; pass the function and arguments.")
    return stages_of(function, traced, compiled, side_effects)


def stages_of(function: Any, traced: Any, compiled: Any, side_effects: tuple[str, ...] = ()) -> Stages:
    """The stages of a function that is traced and compiled."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")  # they are in the result
        plan = getattr(function, "plan", None)  # of a `train.step`
        with contextlib.nullcontext() if plan is None else jax.set_mesh(plan.mesh):
            stablehlo = _stablehlo(traced.lower())
    hlo = compiled.as_text() or ""
    program = parse_hlo(hlo)
    names = traced.jaxpr.jaxpr.debug_info.arg_names
    arguments = {name: signature(each.aval) for name, each in zip(names, traced.jaxpr.jaxpr.invars, strict=True)}
    parameters = _parameters(program)
    donated = [name for name, info in zip(names, jax.tree.leaves(traced.args_info), strict=True) if info.donated]
    return Stages(
        name=traced.fun_name,
        jaxpr=str(traced.jaxpr),
        stablehlo=stablehlo,
        hlo=hlo,
        arguments=arguments,
        dropped=tuple(name for name in names if name not in parameters),
        donations=tuple(_donation(name, arguments[name], parameters, hlo, traced) for name in donated),
        constants=tuple(_constants(_plain(function), traced.jaxpr)),
        side_effects=side_effects,
        kernels=collections.Counter(each.opcode for each, _, _ in kernels(program)),
    )


def _plain(function: Any) -> Any:
    """The function inside `jax.jit` or a `train.step`."""
    plain = getattr(function, "__wrapped__", function) if hasattr(function, "trace") else function
    return getattr(function, "advance", plain)


def _stablehlo(lowered: Any) -> str:
    """The lowered program as text, without the elements of large constants: 100 MB would be 200 MB of text."""
    operation = getattr(lowered.compiler_ir("stablehlo"), "operation", None)
    return lowered.as_text() if operation is None else operation.get_asm(large_elements_limit=16)


def _parameters(program: Program) -> dict[str, int]:
    """The number of each parameter of a program by the name of its argument."""
    entry = program.computations[program.entry].instructions.values()
    return {
        each.op_name.replace("\\'", "'"): int(each.operands[0])
        for each in entry
        if each.opcode == "parameter" and each.op_name
    }


def _donation(name: str, kind: str, parameters: dict[str, int], hlo: str, traced: Any) -> Donation:
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry_computation_layout", hlo.split("\n", 1)[0])
    used = {int(number) for number in re.findall(r"\((\d+), \{", aliases[1])} if aliases else set[int]()
    if name not in parameters:
        return Donation(name, False, "the argument is dropped, since no result depends on it")
    if parameters[name] in used:
        return Donation(name, True, "")
    results = [signature(each) for each in jax.tree.leaves(traced.out_info)]
    if kind not in results:
        return Donation(name, False, f"no result is {kind}")
    return Donation(
        name, False, f"each result that is {kind} is written to another donated buffer, or laid out differently"
    )


def _constants(function: Any, closed: Any) -> Iterator[Constant]:
    """The large arrays that a jaxpr, or one inside it, closes over."""
    named = _closed_over(function)
    for const in {id(each): each for each in _all_consts(closed)}.values():
        size = getattr(const, "nbytes", 0)
        if size >= LARGE:
            name = next((name for name, value in named.items() if _is_same_array(value, const)), "")
            yield Constant(name, signature(const), size)


def _is_same_array(value: Any, const: Any) -> bool:
    if value is const:
        return True
    if not isinstance(value, np.ndarray) or (value.shape, value.dtype) != (const.shape, const.dtype):
        return False
    return np.array_equal(value, np.asarray(const))  # JAX makes another array of one of NumPy


def _all_consts(closed: Any) -> Iterator[Any]:
    yield from getattr(closed, "consts", ())
    for equation in getattr(closed, "jaxpr", closed).eqns:
        for body in sub_jaxprs(equation.params):
            yield from _all_consts(body)


def _observe_tracing(function: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[str]:
    """What a function does besides computing its results: it does so when it is traced, and not when it is run."""
    before = _containers(function)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trace(lambda *args, **kwargs: function(*args, **kwargs), args, kwargs)  # a new function, so that it is traced
    for line in filter(None, printed.getvalue().splitlines()):
        yield f"print({line!r}); write jax.debug.print to print in each call"
    for name, (value, size) in _containers(function).items():
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
            yield f"{name} holds a tracer now; return the value instead"
        elif name in before and before[name][1] != size:
            yield f"{name} had {count_of(before[name][1], 'element')} and has {size}; return the value instead"


def _containers(function: Any) -> dict[str, tuple[Any, int]]:
    """The lists, dicts and sets that a function closes over, with their sizes."""
    named = _closed_over(function)
    return {name: (value, len(value)) for name, value in named.items() if isinstance(value, list | dict | set)}


def _closed_over(function: Any) -> dict[str, Any]:
    """The variables of enclosing scopes that a function reads, by name."""
    try:
        scope = inspect.getclosurevars(function)
    except TypeError:  # not a Python function
        return {}
    return {**scope.globals, **scope.nonlocals}
