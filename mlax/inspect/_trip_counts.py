"""How often a loop in a jaxpr runs, where its bounds follow from constants and from the indices of scans around it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Lanes(NamedTuple):
    """What is known of the variables of a jaxpr while it is traced through: a value in each lane.

    A lane is a combination of the indices of the scans around the jaxpr. A tile of a causal attention, for example, is
    visited by a loop whose bounds depend on the row of tiles: with three rows there are three lanes.
    """

    count: int = 1
    scalars: Mapping[Any, np.ndarray] = {}  # of shape (count,)
    vectors: Mapping[Any, np.ndarray] = {}  # one-dimensional, the same in each lane

    def after(self, equation: Any) -> "Lanes":
        """With the results of an equation, if they follow from what is known."""
        name, results = equation.primitive.name, equation.outvars
        if name == "iota" and len(results[0].aval.shape) == 1:
            return self._replace(vectors={**self.vectors, results[0]: np.arange(results[0].aval.shape[0])})
        if name == "convert_element_type" and self._vector(equation.invars[0]) is not None:
            return self._replace(vectors={**self.vectors, results[0]: self._vector(equation.invars[0])})
        if name == "scan":
            return self._replace(vectors={**self.vectors, **self._stacked_results(equation)})
        if any(_is_integer(each.aval) for each in results):
            return self._replace(scalars={**self.scalars, **self._scalar_results(equation)})
        return self

    def inside(self, equation: Any, body: Any) -> "Lanes":
        """What is known inside a jaxpr that an equation runs; in a while loop or a conditional, nothing."""
        if equation.primitive.name == "scan":
            return self._inside_scan(equation, body)
        if equation.primitive.name in ("while", "cond") or len(equation.invars) != len(body.invars):
            return Lanes()
        pairs = list(zip(equation.invars, body.invars, strict=True))
        scalars = {inner: value for outer, inner in pairs if (value := self._value(outer)) is not None}
        vectors = {inner: value for outer, inner in pairs if (value := self._vector(outer)) is not None}
        return Lanes(self.count, scalars, vectors)

    def _inside_scan(self, equation: Any, body: Any) -> "Lanes":
        # the names of the parameters that count them differ between versions of JAX
        stacked = count_stacked(equation.invars, body.invars)
        carried = len(equation.outvars) - count_stacked(equation.outvars, body.outvars)
        consts = len(body.invars) - stacked - carried
        pairs = list(zip(equation.invars, body.invars, strict=True))
        scalars = {inner: value for outer, inner in pairs[:consts] if (value := self._value(outer)) is not None}
        vectors = {inner: value for outer, inner in pairs[:consts] if (value := self._vector(outer)) is not None}
        slices = {inner: self._vector(outer) for outer, inner in pairs[len(pairs) - stacked :]}
        slices = {inner: value for inner, value in slices.items() if value is not None}
        length = equation.params["length"] if slices else 1
        repeated = {name: np.repeat(value, length) for name, value in scalars.items()}
        tiled = {name: np.tile(value, self.count) for name, value in slices.items()}
        return Lanes(self.count * length, {**repeated, **tiled}, vectors)

    def _stacked_results(self, scan: Any) -> dict[Any, np.ndarray]:
        """The vectors that a scan computes from known ones: JAX takes what a loop repeats out of it, into a scan."""
        body = scan.params["jaxpr"].jaxpr
        pairs = [(outer, inner) for outer, inner in zip(scan.outvars, body.outvars, strict=True) if _is_vector(outer)]
        known = self if self.count == 1 else Lanes(1, {}, self.vectors)
        known = known.inside(scan, body) if pairs else known
        if known.count != scan.params["length"]:
            return {}
        for equation in body.eqns:
            known = known.after(equation)
        found = {outer: known._value(inner) for outer, inner in pairs}
        return {outer: value for outer, value in found.items() if value is not None}

    def trip_counts(self, loop: Any) -> np.ndarray | None:
        """How often a while loop runs in each lane, if it counts from one known number to another; None: unknown."""
        condition, body = loop.params["cond_jaxpr"].jaxpr, loop.params["body_jaxpr"].jaxpr
        consts, carry = loop.params["cond_nconsts"], len(loop.outvars)
        if [each.primitive.name for each in condition.eqns] != ["lt"]:
            return None
        first = len(loop.invars) - carry  # of the carry
        arguments = [*loop.invars[:consts], *loop.invars[first:]]  # of the condition
        positions = [_position(each, condition.invars) for each in condition.eqns[0].invars]
        counter, limit = positions
        if counter is None or counter < consts or not _counts_by_one(body, counter - consts, carry):
            return None
        if limit is not None and limit >= consts and not _is_unchanged(body, limit - consts, carry):
            return None
        start = self._value(arguments[counter])
        stop = self._value(condition.eqns[0].invars[1] if limit is None else arguments[limit])
        return None if start is None or stop is None else np.maximum(stop - start, 0)

    def _scalar_results(self, equation: Any) -> dict[Any, np.ndarray]:
        if equation.primitive.name in ("jit", "pjit", "closed_call"):
            return self._call_results(equation)
        function = _FUNCTIONS.get(equation.primitive.name)
        values = [self._value(each) for each in equation.invars] if function is not None else [None]
        if function is None or any(each is None for each in values):
            return {}
        with np.errstate(all="ignore"):
            return {equation.outvars[0]: np.broadcast_to(function(*values), self.count)}

    def _call_results(self, call: Any) -> dict[Any, np.ndarray]:
        """The results of a call inside JAX, such as that of `clip` or `floor_divide`."""
        body = next((each.jaxpr for each in call.params.values() if hasattr(each, "jaxpr")), None)
        if body is None or len(body.eqns) > 32 or any(self._value(each) is None for each in call.invars):
            return {}
        known = self.inside(call, body)
        for equation in body.eqns:
            known = known.after(equation)
        found = {outer: known._value(inner) for outer, inner in zip(call.outvars, body.outvars, strict=True)}
        return {outer: value for outer, value in found.items() if value is not None}

    def _value(self, variable: Any) -> np.ndarray | None:
        if not hasattr(variable, "val"):
            return self.scalars.get(variable)
        return np.broadcast_to(np.asarray(variable.val), self.count) if _is_integer(variable.aval) else None

    def _vector(self, variable: Any) -> np.ndarray | None:
        return None if hasattr(variable, "val") else self.vectors.get(variable)


def count_stacked(outer: Any, inner: Any) -> int:
    """How many arrays of a scan have an axis of iterations, which those of its body lack."""
    return sum(len(a.aval.shape) > len(b.aval.shape) for a, b in zip(outer, inner, strict=True))


def _is_integer(aval: Any) -> bool:
    kind = getattr(getattr(aval, "dtype", None), "kind", "")  # keys and tokens have none
    return getattr(aval, "shape", None) == () and kind in tuple("biu")


def _is_vector(variable: Any) -> bool:
    return len(variable.aval.shape) == 1 and getattr(variable.aval.dtype, "kind", "") == "i"


def _position(variable: Any, variables: Any) -> int | None:
    return next((i for i, each in enumerate(variables) if each is variable), None)


def _counts_by_one(body: Any, index: int, carry: int) -> bool:
    counter = body.invars[len(body.invars) - carry + index]
    step = next((each for each in body.eqns if each.outvars[0] is body.outvars[index]), None)
    if step is None or step.primitive.name != "add" or not any(each is counter for each in step.invars):
        return False
    return any(hasattr(each, "val") and np.ndim(each.val) == 0 and each.val == 1 for each in step.invars)


def _is_unchanged(body: Any, index: int, carry: int) -> bool:
    return body.outvars[index] is body.invars[len(body.invars) - carry + index]


def _truncate_divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a - np.fmod(a, b)) // b


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _truncate_divide,
    "rem": np.fmod,
    "neg": np.negative,
    "sign": np.sign,
    "max": np.maximum,
    "min": np.minimum,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.logical_not,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
    "convert_element_type": lambda x: x,
    "copy": lambda x: x,
}
