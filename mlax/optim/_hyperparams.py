"""Hyperparameters: their types and ranges, their values at a step, and path patterns."""

import dataclasses
import functools
import math
import typing
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mlax._jax import at_least_float32
from mlax.core import fields_of
from mlax.optim.schedules._base import Schedule

Patterns = str | tuple[str, ...]  # a field annotated so takes one pattern or several, and holds a tuple of them


def normalize_patterns(description: Any) -> None:
    """Hold one pattern as a tuple of one, and refuse what is neither."""
    for name in _pattern_fields(type(description)):
        given = getattr(description, name)
        if isinstance(given, str):
            object.__setattr__(description, name, (given,))
        elif given is not None and not (isinstance(given, tuple) and all(isinstance(each, str) for each in given)):
            raise TypeError(
                f"{type(description).__name__}: {name} is {given!r}, but must be a pattern or a tuple of them, as "
                "'**/bias' is one."
            )


@functools.cache
def _pattern_fields(kind: type) -> tuple[str, ...]:
    hints = typing.get_type_hints(kind)
    return tuple(field.name for field in dataclasses.fields(kind) if hints[field.name] in (Patterns, Patterns | None))


@dataclasses.dataclass(frozen=True)
class Range:
    """What a number may be: finite, at least `least`, and below `limit` if there is one."""

    least: float = 0.0
    limit: float = math.inf

    def __str__(self) -> str:
        return f"at least {self.least:g}" + (f" and below {self.limit:g}" if self.limit < math.inf else "")


Rate = Annotated[float | Schedule, Range()]  # a learning rate, momentum's mate
Beta = Annotated[float | Schedule, Range(0.0, 1.0)]  # how much of an average is kept
NonNegative = Annotated[float | Schedule, Range()]  # of decay, of a limit, of whatever is not negative


@functools.cache
def hyperparam_ranges(kind: type) -> dict[str, Range]:
    """The fields of a description that are numbers, and what they may be."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        field.name: note
        for field in dataclasses.fields(kind)
        for each in (hints[field.name], *typing.get_args(hints[field.name]))  # a number, or one that may be None
        for note in getattr(each, "__metadata__", ())
        if isinstance(note, Range)
    }


def check_hyperparams(description: Any) -> None:
    """Refuse a number that is out of its range."""
    for name, allowed in hyperparam_ranges(type(description)).items():
        value = getattr(description, name)
        if value is None or isinstance(value, Schedule):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            own = "; for a function of the step, subclass optim.Schedule" if callable(value) else ""
            raise TypeError(
                f"{type(description).__name__}: {name} is {value!r}, but must be a number or a schedule{own}."
            )
        _check_range(type(description).__name__, name, float(value), allowed)


def check_overrides(description: Any, given: Mapping[str, Any]) -> None:
    """Refuse a number passed to `update` that is no scalar, or, as far as its value is known, out of its range."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float | np.ndarray | np.generic | jax.Array):
            raise TypeError(
                f"{type(description).__name__}: {name} is {value!r}, but `update` takes a number or an array of one."
            )
        if np.shape(value) != ():
            raise ValueError(f"{type(description).__name__}: {name} has the shape {np.shape(value)}, but is a scalar.")
        if not isinstance(value, Tracer):
            _check_range(type(description).__name__, name, float(value), hyperparam_ranges(type(description))[name])


def _check_range(where: str, name: str, value: float, allowed: Range) -> None:
    if not (math.isfinite(value) and allowed.least <= value < allowed.limit):
        raise ValueError(f"{where}: {name} is {value:g}, but must be finite, {allowed}.")


@dataclasses.dataclass(frozen=True)
class Hyperparams:
    """The numbers of an optimizer at one step for one leaf, by name: Python's as they are, arrays in its dtype."""

    step: jax.Array  # () int32, the updates made before this one
    values: Mapping[str, Any]
    path: str = ""
    dtype: Any = jnp.float32
    factor: Any = None  # of the rate

    def __getattr__(self, name: str) -> Any:
        if name not in self.values:
            raise AttributeError(name)
        value = self.values[name]
        if not isinstance(value, int | float):
            value = value.astype(self.dtype)
        if name == "rate" and self.factor is not None:
            return value * jnp.asarray(self.factor, self.dtype)
        return value

    @property
    def t(self) -> jax.Array:
        """The number of this update, counted from 1, in no dtype narrower than float32."""
        return (self.step + 1).astype(at_least_float32(self.dtype))

    def debias(self, beta: Any) -> jax.Array:
        """`1 / (1 - beta ** t)`, by which to multiply an average of `t` values that began at zero."""
        if isinstance(beta, int | float):
            gone = -jnp.expm1(self.t * math.log(beta)) if beta > 0 else jnp.ones_like(self.t)
        else:
            gone = -jnp.expm1(self.t * jnp.log(beta.astype(self.t.dtype)))
        return (1 / gone).astype(self.dtype)

    def decayed(self, step: jax.Array, w: jax.Array) -> jax.Array:
        """`step + decay * w`, or the step alone where nothing decays."""
        return step if isinstance(self.decay, float) and self.decay == 0 else step + self.decay * w


def hyperparams_at(description: Any, step: jax.Array, given: Mapping[str, Any]) -> dict[str, Any]:
    """Each number of a description: as passed to `update`, or by its schedule, or as it stands in its field."""
    values = {
        name: value for name, value in fields_of(description).items() if name in hyperparam_ranges(type(description))
    }
    for name, value in values.items():
        if name in given:
            values[name] = jnp.asarray(given[name])
        elif value is None:
            continue
        elif isinstance(value, Schedule):
            values[name] = value(step)
        else:
            values[name] = float(value)
    return values
