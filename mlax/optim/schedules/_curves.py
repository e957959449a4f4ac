"""Schedules of one formula: constant, linear, polynomial, cosine, exponential, piecewise, and any function."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp

from mlax.core import frozen
from mlax.optim.schedules._base import Schedule
from mlax.optim.schedules._checks import (
    LAST_STEP,
    check_finite,
    check_positive,
    check_steps,
    is_finite,
    is_step_count,
)

Weights = tuple[jax.Array, jax.Array]  # of the end and of the start
Shape = Callable[[jax.Array, jax.Array], Weights]  # from the fractions of the steps elapsed and remaining


def linear(elapsed: jax.Array, remaining: jax.Array) -> Weights:
    """A straight line."""
    return elapsed, remaining


def cosine(elapsed: jax.Array, remaining: jax.Array) -> Weights:
    """Half a cosine, (1 - cos(pi * elapsed)) / 2, written without cancellation near either end."""
    return jnp.sin(jnp.pi / 2 * elapsed) ** 2, jnp.sin(jnp.pi / 2 * remaining) ** 2


def square_root(elapsed: jax.Array, remaining: jax.Array) -> Weights:
    """The square root of the elapsed fraction, and 1 minus it, written without cancellation."""
    return jnp.sqrt(elapsed), remaining / (1 + jnp.sqrt(elapsed))


def interpolate(start: Any, end: Any, elapsed: jax.Array, remaining: jax.Array, shape: Shape = linear) -> jax.Array:
    """The value between `start` and `end`, `elapsed` steps after the start and `remaining` steps before the end.

    Both counts are given, so that both fractions are as exact as float32. Before the start it is bitwise `start`, and
    after the end bitwise `end`, whatever division and sine a backend has.
    """
    behind = jnp.maximum(elapsed, 0).astype(jnp.float32)
    ahead = jnp.maximum(remaining, 0).astype(jnp.float32)
    total = jnp.where(behind + ahead > 0, behind + ahead, 1.0)  # no division by zero over zero steps
    of_end, of_start = shape(behind / total, ahead / total)
    return jnp.where(remaining <= 0, end, jnp.where(elapsed <= 0, start, start * of_start + end * of_end))


@frozen
class ConstantSchedule(Schedule):
    """A constant schedule: `value` at every step.

    >>> print(optim.ConstantSchedule(0.1).values(7).round(2))
    [0.1 0.1 0.1 0.1 0.1 0.1 0.1]
    """

    value: float  # of every step

    def __post_init__(self) -> None:
        check_finite(self, "value")

    @property
    def length(self) -> int:
        return 0

    @property
    def bounds(self) -> tuple[float, float]:
        return self.value, self.value

    def lengthen(self, times: int) -> Self:
        return self

    def at(self, step):
        return jnp.full(step.shape, self.value, jnp.float32)


class Transition(Schedule):
    """From `start` to `end` over `steps`. Not decorated: each subclass declares these fields in its own order."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        check_finite(self, "start", "end")
        check_steps(self, "steps")

    @property
    def length(self) -> int:
        return self.steps

    @property
    def bounds(self) -> tuple[float, float]:
        return min(self.start, self.end), max(self.start, self.end)

    def lengthen(self, times: int) -> Self:
        return dataclasses.replace(self, steps=self.steps * times)  # pyright: ignore[reportArgumentType]

    def at(self, step):
        return interpolate(self.start, self.end, step, self.steps - step, self.shape)

    def shape(self, elapsed: jax.Array, remaining: jax.Array) -> Weights:
        """The weights of the end and of the start."""
        return linear(elapsed, remaining)


@frozen
class LinearSchedule(Transition):
    """A linear schedule: from `start` to `end` in `steps` equal steps.

    >>> print(optim.LinearSchedule(1.0, 0.0, 4).values(7).round(2))
    [1.   0.75 0.5  0.25 0.   0.   0.  ]
    """

    start: float  # the first value
    end: float  # the last value
    steps: int  # until the end


@frozen
class Polynomial(Transition):
    """Polynomial decay: from `start` to `end` over `steps`: `end + (start - end) * (1 - step / steps) ** power`.

    >>> print(optim.Polynomial(1.0, 0.0, 4).values(7).round(2))
    [1.   0.56 0.25 0.06 0.   0.   0.  ]
    """

    start: float  # the first value
    end: float  # the last value
    steps: int  # until the end
    power: float = 2.0  # 1 is linear

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "power")

    def shape(self, elapsed, remaining):
        of_start = remaining ** float(self.power)
        return 1 - of_start, of_start


@frozen
class Cosine(Transition):
    """Cosine decay: from `start` to `end` over `steps` by half a cosine. Equation 5 of https://arxiv.org/abs/1608.03983

    >>> print(optim.Cosine(1.0, 4).values(7).round(2))
    [1.   0.85 0.5  0.15 0.   0.   0.  ]
    """

    start: float  # the first value
    steps: int  # until the end
    end: float = 0.0  # the last value

    def shape(self, elapsed, remaining):
        return cosine(elapsed, remaining)


@frozen
class Exponential(Schedule):
    """Exponential decay: `start * factor ** (step / every)`, no further than `end`.

    With `staircase` the exponent is rounded down: one factor after each `every` steps. `end` is the lower bound of a
    schedule that decays and the upper bound of one that grows, which needs one; None: no bound.

    >>> print(optim.Exponential(1.0, 0.5, every=2).values(7).round(2))
    [1.   0.71 0.5  0.35 0.25 0.18 0.12]
    """

    start: float  # the first value
    factor: float  # by which it is multiplied
    every: int = 1  # so many steps
    staircase: bool = False  # whether at once, not gradually
    end: float | None = None  # a bound; None: none

    def __post_init__(self) -> None:
        check_positive(self, "start", "factor")
        check_steps(self, "every")
        if not isinstance(self.staircase, bool):
            raise ValueError(f"Exponential: staircase is {self.staircase!r}, but must be True or False.")
        if self.factor == 1:
            raise ValueError("Exponential: factor is 1, which changes nothing; use ConstantSchedule.")
        if self.end is None:
            if self.factor > 1:
                raise ValueError(
                    f"Exponential: factor is {self.factor}, so it grows without bound; pass end=, its upper bound."
                )
            return
        check_finite(self, "end")
        if self.factor < 1 and not 0 <= self.end <= self.start:
            raise ValueError(
                f"Exponential: end is {self.end}, but it decays from {self.start} towards 0; pass a number in between."
            )
        if self.factor > 1 and self.end < self.start:
            raise ValueError(f"Exponential: end is {self.end}, but it grows from {self.start}; pass a larger one.")

    @property
    def length(self) -> int | None:
        if not self.end:
            return None
        exponent = math.log(self.end / self.start) / math.log(self.factor)
        steps = math.ceil(exponent) * self.every if self.staircase else math.ceil(exponent * self.every)
        return steps if steps <= LAST_STEP else None

    @property
    def bounds(self) -> tuple[float, float]:
        end = self.end or 0.0
        return min(self.start, end), max(self.start, end)

    def lengthen(self, times: int) -> Self:
        return dataclasses.replace(self, every=self.every * times)

    def at(self, step):
        exponent = (step // self.every).astype(jnp.float32)
        if not self.staircase:
            exponent = exponent + (step % self.every).astype(jnp.float32) / self.every
        # the logarithm is a float64 of Python: of a factor such as 0.999999 a float32 has only two digits
        value = self.start * jnp.exp(exponent * math.log(self.factor))
        if self.end is None:
            return value
        value = jnp.maximum(value, self.end) if self.factor < 1 else jnp.minimum(value, self.end)
        return value if self.length is None else jnp.where(step >= self.length, self.end, value)


@frozen
class PiecewiseConstant(Schedule):
    """Step decay: `start`, multiplied by a factor at each step of `drops`: `drops=((30_000, 0.1), (60_000, 0.1))`.

    >>> print(optim.PiecewiseConstant(1.0, ((2, 0.1), (4, 0.1))).values(7).round(2))
    [1.   1.   0.1  0.1  0.01 0.01 0.01]
    """

    start: float  # the first value
    drops: tuple[tuple[int, float], ...]  # (step, factor) pairs

    def __post_init__(self) -> None:
        check_finite(self, "start")
        pairs = isinstance(self.drops, tuple) and all(isinstance(drop, tuple) and len(drop) == 2 for drop in self.drops)
        if not pairs or not self.drops:
            raise ValueError(
                f"PiecewiseConstant: drops is {self.drops!r}, but must be pairs of a step and a factor; "
                "pass a tuple of tuples such as ((30_000, 0.1), (60_000, 0.1))."
            )
        for drop in self.drops:
            if not (is_step_count(drop[0], 1) and is_finite(drop[1])):
                raise ValueError(
                    f"PiecewiseConstant: one of the drops is {drop!r}, but must be a step from 1 on and a finite "
                    "factor; pass a pair such as (30_000, 0.1)."
                )
        if any(after <= before for before, after in itertools.pairwise(self.breakpoints)):
            raise ValueError(f"PiecewiseConstant: the drops are at {self.breakpoints}, but must ascend; sort them.")
        for step, value in zip(self.breakpoints, self._values, strict=True):
            if not is_finite(value):
                raise ValueError(
                    f"PiecewiseConstant: from step {step} on it is {value}, which float32 cannot hold; lower a factor."
                )

    @property
    def length(self) -> int:
        return self.drops[-1][0]

    @property
    def breakpoints(self) -> tuple[int, ...]:
        return tuple(step for step, _ in self.drops)

    @property
    def bounds(self) -> tuple[float, float]:
        values = (self.start, *self._values)
        return min(values), max(values)

    def lengthen(self, times: int) -> Self:
        return dataclasses.replace(self, drops=tuple((step * times, factor) for step, factor in self.drops))

    def at(self, step):
        value = jnp.full(step.shape, self.start, jnp.float32)
        for breakpoint, after in zip(self.breakpoints, self._values, strict=True):
            value = jnp.where(step >= breakpoint, after, value)
        return value

    @property
    def _values(self) -> list[float]:
        """The value from each breakpoint on."""
        factors = (factor for _, factor in self.drops)
        return list(itertools.accumulate(factors, lambda value, factor: value * factor, initial=self.start))[1:]


@frozen
class PiecewiseLinear(Schedule):
    """A piecewise linear schedule: straight lines between points, each a step and a value: `points=((0, 0.0), (1_000,
    3e-4), (10_000, 0.0))`.

    Before the first point it has the value of the first, and after the last that of the last.

    >>> print(optim.PiecewiseLinear(((0, 0.0), (2, 1.0), (6, 0.0))).values(7).round(2))
    [0.   0.5  1.   0.75 0.5  0.25 0.  ]
    """

    points: tuple[tuple[int, float], ...]  # (step, value) pairs

    def __post_init__(self) -> None:
        pairs = isinstance(self.points, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in self.points)
        if not pairs or not self.points:
            raise ValueError(
                f"PiecewiseLinear: points is {self.points!r}, but must be pairs of a step and a value; "
                "pass a tuple of tuples such as ((0, 0.0), (1_000, 3e-4), (10_000, 0.0))."
            )
        for point in self.points:
            if not (is_step_count(point[0], 0) and is_finite(point[1])):
                raise ValueError(
                    f"PiecewiseLinear: one of the points is {point!r}, but must be a step from 0 on and a finite "
                    "value; pass a pair such as (1_000, 3e-4)."
                )
        steps = [step for step, _ in self.points]
        if any(after <= before for before, after in itertools.pairwise(steps)):
            raise ValueError(f"PiecewiseLinear: the points are at {tuple(steps)}, but must ascend; sort them.")

    @property
    def length(self) -> int:
        return self.points[-1][0]

    @property
    def breakpoints(self) -> tuple[int, ...]:
        return tuple(step for step, _ in self.points if step)

    @property
    def bounds(self) -> tuple[float, float]:
        values = [value for _, value in self.points]
        return min(values), max(values)

    def lengthen(self, times: int) -> Self:
        return dataclasses.replace(self, points=tuple((step * times, value) for step, value in self.points))

    def at(self, step):
        value = jnp.full(step.shape, self.points[0][1], jnp.float32)
        for (start, before), (end, after) in itertools.pairwise(self.points):
            value = jnp.where(step >= start, interpolate(before, after, step - start, end - step), value)
        return value


@frozen
class Cyclic(Schedule):
    """A cyclic (triangular) schedule: triangles between `low` and `high`: `rise` steps up, `fall` steps down, again and
    again.

    `fall=None` is `rise`. After each cycle the height above `low` is multiplied by `factor`: PyTorch's CyclicLR, where
    0.5 is the mode triangular2. https://arxiv.org/abs/1506.01186

    >>> print(optim.Cyclic(0.0, 1.0, rise=2).values(7).round(2))
    [0.  0.5 1.  0.5 0.  0.5 1. ]
    """

    low: float  # the lowest value
    high: float  # the highest value
    rise: int  # steps from low to high
    fall: int | None = None  # steps back; None: as many
    factor: float = 1.0  # of the height, after each cycle

    def __post_init__(self) -> None:
        check_finite(self, "low", "high")
        check_steps(self, "rise", *(() if self.fall is None else ("fall",)))
        check_positive(self, "factor")
        if self.factor > 1:
            raise ValueError(f"Cyclic: factor is {self.factor}, so it grows without bound; pass at most 1.")

    @property
    def length(self) -> None:
        return None

    @property
    def breakpoints(self) -> tuple[int, ...]:
        return (self.rise, self._period)

    @property
    def bounds(self) -> tuple[float, float]:
        return min(self.low, self.high), max(self.low, self.high)

    def lengthen(self, times: int) -> Self:
        return dataclasses.replace(self, rise=self.rise * times, fall=None if self.fall is None else self.fall * times)

    def at(self, step):
        cycle, elapsed = step // self._period, step % self._period
        rise = interpolate(0.0, 1.0, elapsed, self.rise - elapsed)
        fall = interpolate(1.0, 0.0, elapsed - self.rise, self._period - elapsed)
        height = jnp.where(elapsed <= self.rise, rise, fall) * float(self.factor) ** cycle.astype(jnp.float32)
        return self.low + (self.high - self.low) * height

    @property
    def _period(self) -> int:
        return self.rise + (self.rise if self.fall is None else self.fall)


@frozen
class FunctionSchedule(Schedule):
    """A plain function of the step, one of Optax's schedules for example.

    A hyperparameter that is given a function wraps it: `optim.Adam(lambda step: 1e-3 / (step + 1))`. The function
    takes an int32 array and returns an array of its shape, or a number. Two descriptions are equal, and share one
    compilation, if their functions are the same object.

    >>> print(optim.FunctionSchedule(lambda step: 1 / (1 + step)).values(7).round(2))
    [1.   0.5  0.33 0.25 0.2  0.17 0.14]
    """

    function: Callable[[Any], Any]  # of the step, an array

    def __post_init__(self) -> None:
        if isinstance(self.function, type | Schedule) or not callable(self.function):
            raise TypeError(f"FunctionSchedule: {self.function!r} is not a function of the step; pass one.")

    @property
    def length(self) -> None:
        return None

    def lengthen(self, times: int) -> Schedule:
        return FunctionSchedule(_Stretched(self.function, times))

    def at(self, step):
        with jax.numpy_dtype_promotion("standard"):  # Optax's schedules combine int32 and float32
            value = jnp.asarray(self.function(step))
        if value.shape not in ((), step.shape) or not jnp.issubdtype(value.dtype, jnp.number):
            raise TypeError(
                f"{self}: it returned {value.dtype}{list(value.shape)} for a step of shape {step.shape}, but must "
                "return a number; compute it from the step with jax.numpy."
            )
        return jnp.broadcast_to(value.astype(jnp.float32), step.shape)


@dataclasses.dataclass(frozen=True)
class _Stretched:
    """A function of the step, `times` times as long."""

    function: Callable[[Any], Any]
    times: int

    def __call__(self, step: Any) -> Any:
        return self.function(step // self.times)
