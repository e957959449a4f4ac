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
from mlax.core import matches
from mlax.optim.schedules._base import Schedule
from mlax.optim.schedules._curves import FunctionSchedule


@dataclasses.dataclass(frozen=True)
class Range:
    """The valid values of a hyperparameter: finite, at least `minimum`, and below `limit`."""

    minimum: float = 0.0
    limit: float = math.inf

    def __str__(self) -> str:
        return f"at least {self.minimum:g}" + (f" and below {self.limit:g}" if self.limit < math.inf else "")


Rate = Annotated[float | Schedule, Range()]  # a learning rate
Beta = Annotated[float | Schedule, Range(0.0, 1.0)]  # the decay rate of a moving average, or a momentum
UnitInterval = Annotated[float | Schedule, Range(0.0, 1.0)]  # a factor, or a constant of the Wolfe conditions
NonNegative = Annotated[float | Schedule, Range()]  # a weight decay, a limit, an epsilon
Patterns = str | tuple[str, ...]  # a field of this type takes one path pattern or several, and stores a tuple


@dataclasses.dataclass(frozen=True)
class Hyperparams:
    """The hyperparameters of an optimizer at one step for one leaf: Python numbers as they are, arrays in its dtype."""

    step: jax.Array  # () int32, the number of updates before this one
    values: Mapping[str, Any]  # by name; each is also an attribute
    path: str = ""
    dtype: Any = jnp.float32
    rate_factor: Any = None

    def __getattr__(self, name: str) -> Any:
        if name not in self.values:
            raise AttributeError(name)
        value = self.values[name]
        if not isinstance(value, int | float):
            value = value.astype(self.dtype)
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
        if isinstance(beta, int | float):
            weight = -jnp.expm1((self.t + ahead) * math.log(beta)) if beta > 0 else jnp.ones_like(self.t)
        else:
            weight = -jnp.expm1((self.t + ahead) * jnp.log(beta.astype(self.t.dtype)))
        return (1 / weight).astype(self.dtype)

    def add_decay(self, step: jax.Array, w: jax.Array) -> jax.Array:
        """`step + decay * w`, or `step` for a leaf without weight decay."""
        return step if isinstance(self.decay, float) and self.decay == 0 else step + self.decay * w


def hyperparams_at(optimizer: Any, step: jax.Array, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The value of each hyperparameter: from `overrides`, from its schedule, or the field itself."""
    values: dict[str, Any] = {}
    for name in hyperparam_ranges(type(optimizer)):
        value = getattr(optimizer, name)
        if name in overrides:
            values[name] = jnp.asarray(overrides[name])
        elif isinstance(value, Schedule):
            values[name] = value(step)
        else:
            values[name] = None if value is None else float(value)
    return values


@functools.cache
def hyperparam_ranges(kind: type) -> dict[str, Range]:
    """The fields of an optimizer that are hyperparameters, with their ranges."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        field.name: note
        for field in dataclasses.fields(kind)
        for each in (hints[field.name], *typing.get_args(hints[field.name]))  # the type itself, or in a union with None
        for note in getattr(each, "__metadata__", ())
        if isinstance(note, Range)
    }


def check_hyperparams(optimizer: Any) -> None:
    """Check the hyperparameters of a new optimizer against their ranges."""
    for name, allowed in hyperparam_ranges(type(optimizer)).items():
        value = getattr(optimizer, name)
        if callable(value) and not isinstance(value, type | Schedule):
            object.__setattr__(optimizer, name, FunctionSchedule(value))
            continue
        if value is None or isinstance(value, Schedule):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(
                f"{type(optimizer).__name__}: {name} is {value!r}, but must be a number, a schedule or a function of "
                "the step."
            )
        _check_range(optimizer, name, float(value), allowed)


def check_override(optimizer: Any, name: str, value: Any) -> None:
    """Check a hyperparameter passed to `update`: a scalar and, unless it is traced, within its range."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.ndarray | np.generic | jax.Array):
        raise TypeError(
            f"{type(optimizer).__name__}: {name} is {value!r}, but `update` takes a number or a scalar array."
        )
    if np.shape(value) != ():
        raise ValueError(f"{type(optimizer).__name__}: {name} has shape {np.shape(value)}, but must be a scalar.")
    if not isinstance(value, Tracer):
        _check_range(optimizer, name, float(value), hyperparam_ranges(type(optimizer))[name])


def _check_range(optimizer: Any, name: str, value: float, allowed: Range) -> None:
    if not (math.isfinite(value) and allowed.minimum <= value < allowed.limit):
        raise ValueError(f"{type(optimizer).__name__}: {name} is {value:g}, but must be finite, {allowed}.")


def matches_any(patterns: Patterns | None, path: str, names: tuple[str, ...] = ("kernel", "table")) -> bool:
    """Whether a leaf matches one of the patterns or, if they are None, has one of the names."""
    if patterns is None:
        return path.split("/")[-1] in names
    return any(matches(pattern, path) for pattern in patterns)


def normalize_patterns(optimizer: Any) -> None:
    """Store a single pattern as a tuple, and check the others."""
    for name in _pattern_fields(type(optimizer)):
        value = getattr(optimizer, name)
        if isinstance(value, str):
            object.__setattr__(optimizer, name, (value,))
        elif value is not None and not (isinstance(value, tuple) and all(isinstance(each, str) for each in value)):
            raise TypeError(
                f"{type(optimizer).__name__}: {name} is {value!r}, but must be a pattern or a tuple of them, such as "
                "'**/bias'."
            )


@functools.cache
def _pattern_fields(kind: type) -> tuple[str, ...]:
    hints = typing.get_type_hints(kind)
    return tuple(field.name for field in dataclasses.fields(kind) if hints[field.name] in (Patterns, Patterns | None))
