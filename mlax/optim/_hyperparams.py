"""Fields of optimizers: types and ranges of numbers, their values at a step, dtypes and path patterns."""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from mlax._jax import at_least_float32, with_auto_axes, with_weak_type
from mlax.core import DType, NoMatch, matches
from mlax.optim.schedules._base import Schedule
from mlax.optim.schedules._curves import FunctionSchedule

TINY = 2.0**-126  # the smallest normal float32
MAX_COUNT = 2**31  # steps are int32


@dataclasses.dataclass(frozen=True)
class Range:
    """The valid values of a number: finite, at least `minimum`, and below `limit`.

    A field of an optimizer with this annotation is checked at construction. One that may be a schedule is a
    hyperparameter, which `update` can override; one that is only an int or a float is fixed.
    """

    minimum: float = 0.0
    limit: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.minimum <= value < self.limit  # false for NaN and infinity

    def __str__(self) -> str:
        lower = "above 0" if self.minimum == TINY else f"at least {self.minimum:g}"
        if self.limit == math.inf:
            return f"finite, {lower}"
        return f"{lower} and below {self.limit:g}" if self.limit < MAX_COUNT else lower


Rate = Annotated[float | Schedule, Range()]  # a learning rate
Beta = Annotated[float | Schedule, Range(0.0, 1.0)]  # the decay rate of a moving average, or a momentum
UnitInterval = Annotated[float | Schedule, Range(0.0, 1.0)]  # a factor, or a constant of the Wolfe conditions
NonNegative = Annotated[float | Schedule, Range()]  # a weight decay, a limit, an epsilon
Positive = Annotated[float | Schedule, Range(TINY)]  # an epsilon that alone keeps a denominator from being zero
StartValue = Annotated[float, Range()]  # the first value of a slot, of at least 0
Count = Annotated[int, Range(0, MAX_COUNT)]  # an integer of at least 0, such as the steps of a warm-up
PositiveCount = Annotated[int, Range(1, MAX_COUNT)]  # an integer of at least 1, such as a period
for _alias, _meaning in (  # of those that are equal, such as Rate and NonNegative, Python makes one object
    (Rate, "A number of at least 0, or a schedule of it."),
    (Beta, "A number of at least 0 and below 1, or a schedule of it."),
    (Positive, "A number above 0, or a schedule of it."),
    (Count, "An integer of at least 0."),
    (PositiveCount, "An integer of at least 1."),
):
    _alias.__doc__ = _meaning
Patterns = str | tuple[str, ...]  # a field of this type takes one path pattern or several, and stores a tuple
SlotDTypes = tuple[tuple[str, str], ...]  # a field of this type has pairs of a slot and its dtype
DECAYED_NAMES = ("kernel", "table", "down", "up")  # of the leaves that decay where no patterns say which; LoRA's too


@dataclasses.dataclass(frozen=True)
class Hyperparams:
    """The hyperparameters of an optimizer at one step for one leaf: Python numbers as they are, arrays in its dtype."""

    step: jax.Array  # () int32, the number of updates before this one
    values: Mapping[str, Any]  # by name; each is also an attribute
    path: str = ""
    dtype: Any = jnp.float32
    rate_factor: Any = None
    shares_array: bool = False  # whether scalars that all leaves share are read from an array; see bias_corrections

    def __getattr__(self, name: str) -> Any:
        if name not in self.values:
            raise AttributeError(name)
        value = self.values[name]
        if not isinstance(value, int | float):
            wide = at_least_float32(self.dtype)
            value = value.astype(wide)
            if wide != self.dtype:  # weakly typed as Python's numbers are: a narrow dtype would round a beta to 1
                value = with_weak_type(value)
        if name == "rate" and self.rate_factor is not None:
            return value * jnp.asarray(self.rate_factor, self.dtype)
        return value

    @property
    def t(self) -> jax.Array:
        """The number of this update, counted from 1, in at least float32."""
        return (self.step + 1).astype(at_least_float32(self.dtype))

    def bias_correction(self, beta: Any, ahead: int = 0) -> jax.Array:
        """`1 / (1 - beta ** t)`, the factor that removes the bias of a moving average that started at zero.

        With `ahead`, the one of so many updates later.
        """
        return self.bias_corrections(beta, beta, ahead=ahead)[0]

    def bias_corrections(self, *betas: Any, ahead: int = 0) -> list[jax.Array]:
        """The `bias_correction` of several decay rates.

        With `shares_array` they are computed as one array. On a GPU, XLA updates leaves of one shape by one kernel if
        they share an array, and not if they share scalars only: of GPT-2's 98 vectors, 13 at a time.
        """
        t = self.t + ahead
        logs = [log_beta(beta, t.dtype) for beta in betas]
        if not self.shares_array:
            return [(1 / -jnp.expm1(t * log)).astype(self.dtype) for log in logs]
        is_constant = all(isinstance(log, float) for log in logs)
        array = np.array(logs, t.dtype) if is_constant else jnp.stack([jnp.asarray(log, t.dtype) for log in logs])
        factors = (1 / -jnp.expm1(t * array)).astype(self.dtype)
        return [lax.index_in_dim(factors, i, keepdims=False) for i in range(len(betas))]

    def add_eps(self, root: jax.Array) -> jax.Array:
        """`root + eps`, a denominator; 1 where that is zero, as with `eps=0` before the first gradient."""
        total = root + self.eps
        if isinstance(self.eps, float) and self.eps >= float(jnp.finfo(self.dtype).tiny):
            return total
        return jnp.where(total == 0, jnp.ones_like(total), total)

    def add_decay(self, step: jax.Array, w: jax.Array) -> jax.Array:
        """`step + decay * w`, or `step` for a leaf without weight decay."""
        return step if isinstance(self.decay, float) and self.decay == 0 else step + self.decay * w


def with_auto_axes_at(now: Hyperparams, function: Callable[..., Any], *leaves: Any, like: Any) -> Any:
    """`function(now, *leaves)` by `with_auto_axes`, which needs the arrays in `now` as arguments."""
    arrays = {name: value for name, value in now.values.items() if isinstance(value, jax.Array)}

    def run(step: jax.Array, arrays: dict[str, jax.Array], *leaves: Any) -> Any:
        return function(dataclasses.replace(now, step=step, values={**now.values, **arrays}), *leaves)

    return with_auto_axes(run, now.step, arrays, *leaves, like=like)


def log_beta(beta: Any, dtype: Any) -> Any:
    """The logarithm of a decay rate from 0 to below 1: finite and negative, even for 0 or if float32 rounds it to 1."""
    if isinstance(beta, int | float):
        return math.log(max(beta, TINY))  # in float64
    return jnp.log(jnp.maximum(beta.astype(dtype), TINY))


def hyperparams_at(optimizer: Any, step: jax.Array, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The value of each hyperparameter: from `overrides`, from its schedule, or the field itself."""
    values: dict[str, Any] = {}
    for name in hyperparam_ranges(type(optimizer)):
        value = getattr(optimizer, name)
        if name in overrides:
            given = jnp.asarray(overrides[name])
            given = given if jnp.issubdtype(given.dtype, jnp.floating) else given.astype(jnp.float32)
            values[name] = _guard(optimizer, name, given)
        elif isinstance(value, Schedule):
            here = value(step)
            values[name] = here if value.bounds else _guard(optimizer, name, here)
        else:
            values[name] = None if value is None else float(value)
    return values


def _guard(optimizer: Any, name: str, value: jax.Array) -> jax.Array:
    """The value of a hyperparameter within its range: outside it is an error or, if it is traced, NaN.

    A compiled step cannot raise an error; NaN weights stop a training, where a negative rate would go unnoticed.
    """
    allowed = hyperparam_ranges(type(optimizer))[name]
    if not isinstance(value, Tracer):
        _check_range(optimizer, name, float(value), allowed)
        return value
    return jnp.where((value >= allowed.minimum) & (value < allowed.limit), value, jnp.nan)


class NumberField(NamedTuple):
    """A field with a range: the types that it takes besides NumPy's scalars, and whether it can be None."""

    range: Range
    types: tuple[type, ...]  # int; float; or float and Schedule
    optional: bool

    @property
    def noun(self) -> str:
        """What it takes, for error messages."""
        if Schedule in self.types:
            return "a number, a schedule or a function of the step"
        return "an integer" if self.types == (int,) else "a number that does not change"


@functools.cache
def number_fields(kind: type) -> dict[str, NumberField]:
    """The fields of an optimizer that have a range."""
    found = {}
    for field, hint in _annotations(kind).items():
        for each in (hint, *typing.get_args(hint)):  # the type itself, or in a union with None
            for note in getattr(each, "__metadata__", ()):
                if isinstance(note, Range):
                    types = typing.get_args(each.__origin__) or (each.__origin__,)
                    found[field] = NumberField(note, types, type(None) in typing.get_args(hint))
    return found


@functools.cache
def hyperparam_ranges(kind: type) -> dict[str, Range]:
    """The fields of an optimizer that are hyperparameters, with their ranges."""
    return {name: number.range for name, number in number_fields(kind).items() if Schedule in number.types}


def check_fields(optimizer: Any) -> None:
    """Check the numbers of a new optimizer against their ranges, and its dtypes; store a single pattern as a tuple."""
    for name, number in number_fields(type(optimizer)).items():
        _check_number(optimizer, name, number)
    hints = _annotations(type(optimizer))
    for name, hint in hints.items():
        if hint == DType:
            _check_floating(optimizer, name, getattr(optimizer, name))
        elif hint == SlotDTypes:
            _check_slot_dtypes(optimizer, name)
        elif hint in (Patterns, Patterns | None):
            _normalize_patterns(optimizer, name)


def _check_number(optimizer: Any, name: str, number: NumberField) -> None:
    value = getattr(optimizer, name)
    if value is None and number.optional:
        return
    if callable(value) and not isinstance(value, type | Schedule) and Schedule in number.types:
        object.__setattr__(optimizer, name, FunctionSchedule(value))
    elif isinstance(value, Schedule) and Schedule in number.types:
        for bound in value.bounds or ():
            if float(np.float32(bound)) not in number.range:
                raise ValueError(
                    f"{type(optimizer).__name__}: {name} is {value}, which reaches {bound:g}, but every value must be "
                    f"{number.range}."
                )
    elif isinstance(value, bool) or not isinstance(value, int if number.types == (int,) else int | float):
        raise TypeError(f"{type(optimizer).__name__}: {name} is {value!r}, but must be {number.noun}.")
    else:
        _check_range(optimizer, name, value, number.range)


def _check_floating(optimizer: Any, name: str, dtype: Any) -> None:
    if dtype is None:
        return
    try:
        floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise TypeError(
            f"{type(optimizer).__name__}: {name} is {dtype!r}, but must be a floating-point dtype; "
            "pass a name such as 'bfloat16' or 'float32'."
        )


def check_wide(optimizer: Any) -> None:
    """Raise an error if the compute dtype of an optimizer that decomposes matrices is narrower than float32."""
    dtype = optimizer.accum_dtype
    if dtype is not None and at_least_float32(dtype) != jnp.dtype(dtype):
        raise ValueError(
            f"{type(optimizer).__name__}: accum_dtype is {jnp.dtype(dtype).name}, in which JAX decomposes no matrices; "
            "pass 'float32', or None."
        )


def _check_slot_dtypes(optimizer: Any, name: str) -> None:
    pairs = getattr(optimizer, name)
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError(
            f"{type(optimizer).__name__}: {name} is {pairs!r}, but must be pairs of a slot and a dtype, such as "
            "(('mean', 'bfloat16'),)."
        )
    for slot, dtype in pairs:
        _check_floating(optimizer, f"the dtype of the slot {slot!r}", dtype)


def check_override(optimizer: Any, name: str, value: Any) -> None:
    """Check a hyperparameter passed to `update`: used, a scalar and, unless it is traced, within its range."""
    owner = type(optimizer).__name__
    if reason := optimizer.override_error(name):
        raise TypeError(f"{owner}: update cannot set {name}: {reason}")
    if isinstance(value, bool) or not isinstance(value, int | float | np.ndarray | np.generic | jax.Array):
        raise TypeError(f"{owner}: {name} is {value!r}, but `update` takes a number or a scalar array.")
    if np.shape(value) != ():
        raise ValueError(f"{owner}: {name} has shape {np.shape(value)}, but must be a scalar.")
    dtype = jnp.result_type(value)
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(f"{owner}: {name} is {dtype}, but must be a real number.")
    if not isinstance(value, Tracer):
        _check_range(optimizer, name, float(value), hyperparam_ranges(type(optimizer))[name])


def _check_range(optimizer: Any, name: str, value: float, allowed: Range) -> None:
    if value not in allowed:
        raise ValueError(f"{type(optimizer).__name__}: {name} is {value:g}, but must be {allowed}.")


def matches_any(patterns: Patterns | None, path: str, names: tuple[str, ...] = DECAYED_NAMES) -> bool:
    """Whether a leaf matches the patterns or, if they are None, has one of the names."""
    if patterns is None:
        return path.split("/")[-1] in names
    return matches(patterns, path)


def check_decayed(optimizer: Any, paths: Collection[str]) -> None:
    """Raise an error if a weight decay without patterns applies to no leaf."""
    off = isinstance(optimizer.decay, int | float) and optimizer.decay == 0
    if not off and optimizer.decayed is None:
        remedy = "pass decayed=, patterns of the leaves to decay, such as '**', or decay=0.0"
        check_names(optimizer, f"decay is {optimizer.decay}", DECAYED_NAMES, paths, remedy)


def check_names(optimizer: Any, reason: str, names: tuple[str, ...], paths: Collection[str], remedy: str) -> None:
    """Raise an error if no leaf has one of the names, which stand for patterns that were not given."""
    if paths and not any(matches_any(None, path, names) for path in paths):
        some = ", ".join(repr(path) for path in list(paths)[:3]) + ", ..." * (len(paths) > 3)
        raise NoMatch(
            f"{type(optimizer).__name__}: {reason}, but no leaf is named {' or '.join(names)}: there are {some}; "
            f"{remedy}."
        )


def _normalize_patterns(optimizer: Any, name: str) -> None:
    """Store a single pattern as a tuple, and check the others."""
    value = getattr(optimizer, name)
    if isinstance(value, str):
        object.__setattr__(optimizer, name, (value,))
    elif value is not None and not (isinstance(value, tuple) and all(isinstance(each, str) for each in value)):
        raise TypeError(
            f"{type(optimizer).__name__}: {name} is {value!r}, but must be a pattern or a tuple of them, such as "
            "'**/bias'."
        )


@functools.cache
def _annotations(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
