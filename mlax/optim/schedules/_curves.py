"""Schedules of one formula: ConstantSchedule, LinearSchedule, Polynomial, Cosine, Exponential, PiecewiseConstant."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mlax.core import frozen
from mlax.optim.schedules._base import Schedule
from mlax.optim.schedules._checks import LAST_STEP, check_finite, check_positive, check_steps, is_finite, is_step_count

Fraction = jax.Array
Shape = Callable[[Fraction, Fraction], tuple[jax.Array, jax.Array]]  # fractions gone and left to weights of both ends


def linear(gone: Fraction, left: Fraction) -> tuple[jax.Array, jax.Array]:
    """A straight line."""
    return gone, left


def cosine(gone: Fraction, left: Fraction) -> tuple[jax.Array, jax.Array]:
    """Half a cosine: (1 - cos(pi * gone)) / 2, written so that nothing cancels near either end."""
    return jnp.sin(jnp.pi / 2 * gone) ** 2, jnp.sin(jnp.pi / 2 * left) ** 2


def sqrt(gone: Fraction, left: Fraction) -> tuple[jax.Array, jax.Array]:
    """The square root of `gone`; one minus it is written so that nothing cancels."""
    return jnp.sqrt(gone), left / (1 + jnp.sqrt(gone))


def interpolate(start: Any, end: Any, gone: jax.Array, left: jax.Array, shape: Shape = linear) -> jax.Array:
    """The value on the way from `start` to `end`, `gone` steps after its beginning and `left` steps before its end.

    Both counts, since a fraction and what it leaves of 1 are then each as exact as float32 is. Before the
    beginning it is `start` and after the end `end`, to the bit: no backend's division or sine takes part there.
    """
    behind = jnp.maximum(gone, 0).astype(jnp.float32)
    ahead = jnp.maximum(left, 0).astype(jnp.float32)
    whole = jnp.where(behind + ahead > 0, behind + ahead, 1.0)  # a way of no steps has no fractions
    of_end, of_start = shape(behind / whole, ahead / whole)
    return jnp.where(left <= 0, end, jnp.where(gone <= 0, start, start * of_start + end * of_end))


@frozen
class ConstantSchedule(Schedule):
    """`value` at every step."""

    value: float

    def __post_init__(self) -> None:
        check_finite(self, "value")

    @property
    def length(self) -> int:
        return 0

    def stretched(self, times: int) -> "ConstantSchedule":
        return self

    def at(self, step):
        return jnp.full(step.shape, self.value, jnp.float32)


@frozen
class LinearSchedule(Schedule):
    """From `start` to `end` in `steps` equal steps."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        check_finite(self, "start", "end")
        check_steps(self, "steps")

    @property
    def length(self) -> int:
        return self.steps

    def stretched(self, times: int) -> "LinearSchedule":
        return dataclasses.replace(self, steps=self.steps * times)

    def at(self, step):
        return interpolate(self.start, self.end, step, self.steps - step)


@frozen
class Polynomial(Schedule):
    """From `start` to `end` over `steps`: end + (start - end) * (1 - step / steps) ** power."""

    start: float
    end: float
    steps: int
    power: float = 2.0

    def __post_init__(self) -> None:
        check_finite(self, "start", "end")
        check_steps(self, "steps")
        check_positive(self, "power")

    @property
    def length(self) -> int:
        return self.steps

    def stretched(self, times: int) -> "Polynomial":
        return dataclasses.replace(self, steps=self.steps * times)

    def at(self, step):
        return interpolate(self.start, self.end, step, self.steps - step, self._weights)

    def _weights(self, gone, left):
        of_start = left ** float(self.power)
        return 1 - of_start, of_start


@frozen
class Cosine(Schedule):
    """From `start` to `end` over `steps` by half a cosine. Equation 5 of https://arxiv.org/abs/1608.03983."""

    start: float
    steps: int
    end: float = 0.0

    def __post_init__(self) -> None:
        check_finite(self, "start", "end")
        check_steps(self, "steps")

    @property
    def length(self) -> int:
        return self.steps

    def stretched(self, times: int) -> "Cosine":
        return dataclasses.replace(self, steps=self.steps * times)

    def at(self, step):
        return interpolate(self.start, self.end, step, self.steps - step, cosine)


@frozen
class Exponential(Schedule):
    """start * factor ** (step / every), and no further than `end`.

    With `staircase` the exponent is rounded down: one factor at once after each `every` steps. `end` is the floor
    of a schedule that falls and the ceiling of one that grows; None: a falling one has none, a growing one needs one.
    """

    start: float
    factor: float
    every: int = 1
    staircase: bool = False
    end: float | None = None

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
                    f"Exponential: factor is {self.factor}, so it grows without bound; pass end=, its ceiling."
                )
            return
        check_finite(self, "end")
        if self.factor < 1 and not 0 <= self.end <= self.start:
            raise ValueError(
                f"Exponential: end is {self.end}, but it falls from {self.start} towards 0; pass a number between."
            )
        if self.factor > 1 and self.end < self.start:
            raise ValueError(f"Exponential: end is {self.end}, but it grows from {self.start}; pass a larger one.")

    @property
    def length(self) -> int | None:
        if not self.end:
            return None
        turns = math.log(self.end / self.start) / math.log(self.factor)
        steps = math.ceil(turns) * self.every if self.staircase else math.ceil(turns * self.every)
        return steps if steps <= LAST_STEP else None

    def stretched(self, times: int) -> "Exponential":
        return dataclasses.replace(self, every=self.every * times)

    def at(self, step):
        whole, rest = step // self.every, step % self.every
        turns = whole.astype(jnp.float32)
        if not self.staircase:
            turns = turns + rest.astype(jnp.float32) / self.every
        # The logarithm is taken here, in double: of a factor such as 0.999999 float32 would keep two digits of it.
        value = self.start * jnp.exp(turns * math.log(self.factor))
        if self.end is None:
            return value
        value = jnp.maximum(value, self.end) if self.factor < 1 else jnp.minimum(value, self.end)
        return value if self.length is None else jnp.where(step >= self.length, self.end, value)


@frozen
class PiecewiseConstant(Schedule):
    """`start`, and from each step of `drops` on times its factor: drops=((30_000, 0.1), (60_000, 0.1))."""

    start: float
    drops: tuple[tuple[int, float], ...]

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
        if any(after <= before for before, after in itertools.pairwise(self.marks)):
            raise ValueError(f"PiecewiseConstant: the drops are at {self.marks}, but must ascend; sort them.")
        for step, value in zip(self.marks, self._after, strict=True):
            if not is_finite(value):
                raise ValueError(
                    f"PiecewiseConstant: from step {step} on it is {value}, which float32 cannot hold; lower a factor."
                )

    @property
    def length(self) -> int:
        return self.drops[-1][0]

    @property
    def marks(self) -> tuple[int, ...]:
        return tuple(step for step, _ in self.drops)

    def stretched(self, times: int) -> "PiecewiseConstant":
        return dataclasses.replace(self, drops=tuple((step * times, factor) for step, factor in self.drops))

    def at(self, step):
        value = jnp.full(step.shape, self.start, jnp.float32)
        for mark, after in zip(self.marks, self._after, strict=True):
            value = jnp.where(step >= mark, after, value)
        return value

    @property
    def _after(self) -> list[float]:
        """The value from each mark on."""
        factors = (factor for _, factor in self.drops)
        return list(itertools.accumulate(factors, lambda value, factor: value * factor, initial=self.start))[1:]
