"""nonfinite: find the operation, and its layer, that made the first NaN or infinity of a computation."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mlax._jax import is_backward_pass, layer_path, source_line
from mlax.core import STACKED, Documented, document_tuple, signature
from mlax.inspect._flops import sub_jaxprs
from mlax.inspect._trip_counts import count_stacked

ARGUMENT = "argument"


@document_tuple
class Statistics(NamedTuple):
    """What an array holds: its signature, its smallest and largest finite element, and how many are not finite."""

    signature: str  # like "float32[8, 16]"
    size: int  # the number of elements
    lowest: float  # of the finite elements; NaN if there are none
    highest: float  # finite element
    zeros: int  # how many
    nan: int  # how many
    inf: int  # how many
    negative_inf: int  # how many

    def __str__(self) -> str:
        counts = {"zero": self.zeros, "NaN": self.nan, "inf": self.inf, "-inf": self.negative_inf}
        some = [f"{count:,} {name}" for name, count in counts.items() if count]
        bounds = [f"{self.lowest:.4g} to {self.highest:.4g}"] if self.lowest <= self.highest else []
        return f"{self.signature}: {', '.join([*bounds, *some])}" + (f" of {self.size:,}" if some else "")


@dataclasses.dataclass(frozen=True)
class NonFinite(metaclass=Documented):
    """The operation whose result is the first with a NaN, or with an infinity if there is no NaN, and its layer."""

    path: str  # of the layer, like "blocks/7/norm"; "" outside of a layer
    is_backward: bool  # whether in the backward pass
    primitive: str  # like "log"; "argument" if the function was called with it
    source: str  # like "model.py:31 (wire)"; of an argument its number and path, like "0/up/kernel"
    inputs: tuple[Statistics, ...]  # of the operation
    outputs: tuple[Statistics, ...]  # of the operation
    cause: "NonFinite | None" = None  # of a NaN that was computed from an infinity: where that came from

    def __str__(self) -> str:
        kind = "NaN" if any(each.nan for each in self.outputs) else "infinity"
        if self.primitive == ARGUMENT:
            return f"the first {kind} is in the argument {self.source}: {self.outputs[0]}"
        where = f"in {self.path}" if self.path else "outside of any layer"
        line = f" at {self.source}" if self.source else ""
        lines = [
            f"the first {kind} is {where}, in the {'backward' if self.is_backward else 'forward'} pass: "
            f"{self.primitive}{line}",
            *(f"  input   {each}" for each in self.inputs),
            *(f"  output  {each}" for each in self.outputs),
        ]
        if self.cause is not None:
            lines.append(f"it is computed from an infinity: {str(self.cause).removeprefix('the first infinity is ')}")
        return "\n".join(lines)


def nonfinite(function: Callable[..., Any], *args: Any, **kwargs: Any) -> NonFinite | None:
    """Find which layer made the first NaN or infinity in the result of `function(*args, **kwargs)`; None if none did.

    Only what reaches the result counts, so a mask of -inf is not blamed. Pass `jax.grad(loss)` to include the backward
    pass. In a scanned `Repeat` the path has the number of the repetition: blocks/7/norm. The jaxpr is evaluated
    operation by operation, several times, which is slow. Of a `train.step`, `step.nonfinite(state, batch)` is returned.
    """
    if hasattr(function, "nonfinite"):  # a `train.step`, whose result is finite: it skips the update
        return cast(Any, function).nonfinite(*args, **kwargs)
    if not callable(function):
        raise TypeError(f"nonfinite: {function!r} is not a function; the call is nonfinite(function, *arguments).")
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = {i: jnp.asarray(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)}

    def call(arrays: dict[int, jax.Array]) -> Any:
        args, kwargs = structure.unflatten([arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        return function(*args, **kwargs)

    jaxpr = jax.make_jaxpr(call)(arrays)
    paths = [path[1:] for path, _ in jax.tree.leaves_with_path((args, kwargs))]
    names = [jax.tree_util.keystr(paths[i], simple=True, separator="/") for i in arrays]
    program = _Program(jaxpr.jaxpr, jaxpr.consts, list(arrays.values()), tuple(names))
    return _locate(program, jnp.isnan, jaxpr.jaxpr.outvars) or _locate(program, jnp.isinf, jaxpr.jaxpr.outvars)


_ARRAYS = jax.Array | np.ndarray | np.generic

IsBad = Callable[[jax.Array], jax.Array]


class _Program(NamedTuple):
    """A jaxpr with its arguments, and the equations that it is nested in, each with the index of its iteration."""

    jaxpr: Any
    consts: Sequence[Any]
    arguments: Sequence[Any]
    names: tuple[str, ...] = ()  # of the arguments, at the top level
    nest: tuple[tuple[Any, int | None], ...] = ()

    def run(self) -> Iterator[tuple[Any, list[Any], list[Any]]]:
        """Evaluate one equation after another: (equation, inputs, outputs). Frees what no later equation needs."""
        values = dict(zip([*self.jaxpr.constvars, *self.jaxpr.invars], [*self.consts, *self.arguments], strict=True))
        last_use = {each: i for i, equation in enumerate(self.jaxpr.eqns) for each in _variables(equation.invars)}
        for i, equation in enumerate(self.jaxpr.eqns):
            inputs = [each.val if _is_literal(each) else values[each] for each in equation.invars]
            outputs = self._evaluate(equation, inputs)
            yield equation, inputs, outputs
            values.update(zip(equation.outvars, outputs, strict=True))
            for each in set(_variables(equation.invars)):
                if last_use[each] == i:
                    del values[each]

    def _evaluate(self, equation: Any, inputs: list[Any]) -> list[Any]:
        """The outputs of one equation, as those of a jaxpr that has no other; None for one that is not used."""
        if any(equation.params.get("donated_invars", ())):  # they are needed again
            kept = {"donated_invars": (False,) * len(equation.invars)}
            equation = equation.replace(params={**equation.params, **kept})
        given = {each: value for each, value in zip(equation.invars, inputs, strict=True) if not _is_literal(each)}
        results = [each for each in equation.outvars if not isinstance(each, core.DropVar)]
        debug_info = self.jaxpr.debug_info._replace(arg_names=("",) * len(given), result_paths=("",) * len(results))
        jaxpr = core.Jaxpr([], list(given), results, [equation], equation.effects, debug_info)
        outputs = dict(zip(results, core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, []))(*given.values()), strict=True))
        return [outputs.get(each) for each in equation.outvars]


def _locate(program: _Program, is_bad: IsBad, results: Sequence[Any]) -> NonFinite | None:
    """The first operation from whose bad elements those of the results come; None if the results have none."""
    origin, argument = _origin(program, is_bad, results)
    if origin is None:
        return None if argument is None or not program.names else _describe_argument(program, argument)
    for i, (equation, inputs, outputs) in enumerate(program.run()):
        if i == origin:
            return _describe(program, equation, inputs, outputs, is_bad)
    raise AssertionError(f"there is no equation {origin}")


def _origin(program: _Program, is_bad: IsBad, results: Sequence[Any]) -> tuple[int | None, int | None]:
    """Where the bad elements of the results come from: the index of an equation, and else that of an argument.

    It is the first equation that makes some from inputs without any.
    """
    bad = {each: _any(is_bad, value) for each, value in zip(program.jaxpr.invars, program.arguments, strict=True)}
    for equation, _, outputs in program.run():
        bad |= {each: _any(is_bad, value) for each, value in zip(equation.outvars, outputs, strict=True)}
    reaching = {each for each in _variables(results) if bad.get(each)}
    first = None
    for i in reversed(range(len(program.jaxpr.eqns))):
        equation = program.jaxpr.eqns[i]
        if reaching.intersection(equation.outvars):
            sources = {each for each in _variables(equation.invars) if bad.get(each)}
            reaching |= sources
            first = first if sources else i
    return first, next((i for i, each in enumerate(program.jaxpr.invars) if each in reaching), None)


def _describe_argument(program: _Program, index: int) -> NonFinite:
    statistics = _statistics(program.arguments[index])
    return NonFinite("", False, ARGUMENT, program.names[index], (), (statistics,))


def _describe(program: _Program, equation: Any, inputs: list[Any], outputs: list[Any], is_bad: IsBad) -> NonFinite:
    """The operation of an equation, or within it, that made the bad elements in its outputs."""
    infinite = [each for each, value in zip(equation.invars, inputs, strict=True) if _any(jnp.isinf, value)]
    cause = _locate(program, jnp.isinf, infinite) if is_bad is jnp.isnan and infinite else None
    inner = _enter(program, equation, inputs, is_bad)
    found = None if inner is None else _locate(inner, is_bad, inner.jaxpr.outvars)
    if found is not None:
        return found if found.cause is not None else dataclasses.replace(found, cause=cause)
    nest = (*program.nest, (equation, None))
    equations = [each for each, _ in nest]
    return NonFinite(
        path=_numbered_path(nest),
        is_backward=is_backward_pass(equations),
        primitive=equation.primitive.name,
        source=source_line(equations),
        inputs=tuple(_statistics(value) for value in inputs if _is_float(value)),
        outputs=tuple(_statistics(value) for value in outputs if _is_float(value)),
        cause=cause,
    )


def _enter(program: _Program, equation: Any, inputs: list[Any], is_bad: IsBad) -> _Program | None:
    """The jaxpr that an equation runs, in the iteration that made the bad elements; None if it runs none."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _enter_scan(program, equation, inputs, is_bad)
    if name == "while":
        return _enter_while(program, equation, inputs, is_bad)
    if name == "cond":
        index, *inputs = inputs
        body = params["branches"][int(np.clip(index, 0, len(params["branches"]) - 1))]
    else:
        bodies = [each for each in sub_jaxprs(params) if len(getattr(each, "jaxpr", each).invars) == len(inputs)]
        if name in ("shard_map", "pallas_call") or len(bodies) != 1:
            return None
        (body,) = bodies
    nest = (*program.nest, (equation, None))
    return _Program(getattr(body, "jaxpr", body), getattr(body, "consts", ()), inputs, nest=nest)


def _enter_scan(program: _Program, equation: Any, inputs: list[Any], is_bad: IsBad) -> _Program | None:
    body, length = equation.params["jaxpr"], equation.params["length"]
    # the names of the parameters that count them differ between versions of JAX
    num_xs = count_stacked(equation.invars, body.jaxpr.invars)
    num_carry = len(equation.outvars) - count_stacked(equation.outvars, body.jaxpr.outvars)
    num_consts = len(inputs) - num_carry - num_xs
    consts, carry, xs = inputs[:num_consts], inputs[num_consts : len(inputs) - num_xs], inputs[len(inputs) - num_xs :]
    run = jax.jit(core.jaxpr_as_fun(body))
    for i in reversed(range(length)) if equation.params["reverse"] else range(length):
        arguments = [*consts, *carry, *(x[i] for x in xs)]
        outputs = run(*arguments)
        if any(_any(is_bad, value) for value in outputs):
            return _Program(body.jaxpr, body.consts, arguments, nest=(*program.nest, (equation, i)))
        carry = outputs[:num_carry]
    return None


def _enter_while(program: _Program, equation: Any, inputs: list[Any], is_bad: IsBad) -> _Program | None:
    params = equation.params
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    cond_consts, consts, carry = inputs[: split[0]], inputs[split[0] : split[1]], inputs[split[1] :]
    condition, run = (jax.jit(core.jaxpr_as_fun(params[name])) for name in ("cond_jaxpr", "body_jaxpr"))
    body, i = params["body_jaxpr"], 0
    while condition(*cond_consts, *carry)[0]:
        outputs = run(*consts, *carry)
        if any(_any(is_bad, value) for value in outputs):
            return _Program(body.jaxpr, body.consts, [*consts, *carry], nest=(*program.nest, (equation, i)))
        carry, i = outputs, i + 1
    return None


def _numbered_path(nest: Sequence[tuple[Any, int | None]]) -> str:
    """The path of the layer, with the number of the repetition in place of the name of a scanned stack."""
    equations = [equation for equation, _ in nest]
    names = layer_path(equations).split("/")
    for depth, (_, index) in enumerate(nest):
        last = len(layer_path(equations[: depth + 1]).split("/")) - 1
        if index is not None and names[last] == STACKED:
            names[last] = str(index)
    return "/".join(names)


def _statistics(value: Any) -> Statistics:
    array = np.asarray(value)
    wide = array.astype(np.promote_types(np.float64, array.dtype) if array.dtype.kind in "fc" else np.float64)
    finite = np.real(wide[np.isfinite(wide)])
    bounds = (float(finite.min()), float(finite.max())) if finite.size else (float("nan"), float("nan"))
    return Statistics(
        signature=signature(value),
        size=array.size,
        lowest=bounds[0],
        highest=bounds[1],
        zeros=int(np.sum(wide == 0)),
        nan=int(np.sum(np.isnan(wide))),
        inf=int(np.sum(wide == np.inf)),
        negative_inf=int(np.sum(wide == -np.inf)),
    )


def _any(is_bad: IsBad, value: Any) -> Any:
    """Whether an array has a bad element, on the device, so that nothing waits for it yet."""
    return jnp.any(is_bad(value)) if _is_float(value) else False


def _is_float(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.inexact)


def _is_literal(variable: Any) -> bool:
    return hasattr(variable, "val")


def _variables(variables: Sequence[Any]) -> list[Any]:
    return [each for each in variables if not _is_literal(each)]
