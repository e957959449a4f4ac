"""Schedules made of schedules: ScaledSchedule, JoinedSchedules, WarmRestarts."""

import dataclasses
from typing import Self

import jax.numpy as jnp

from mlax.core import frozen
from mlax.optim.schedules._base import Schedule, check_schedule, union_bounds
from mlax.optim.schedules._checks import (
    LAST_STEP,
    check_finite,
    check_length,
    check_positive,
    check_steps,
    is_finite,
    is_step_count,
)


@frozen
class ScaledSchedule(Schedule):
    """A scaled schedule: `schedule` times `factor`.

    >>> print(optim.ScaledSchedule(optim.Cosine(1.0, 4), 0.1).values(7).round(2))
    [0.1  0.09 0.05 0.01 0.   0.   0.  ]
    """

    schedule: Schedule  # the schedule inside
    factor: float  # of every value

    def __post_init__(self) -> None:
        check_schedule(self, self.schedule)
        check_finite(self, "factor")

    @property
    def length(self) -> int | None:
        return self.schedule.length

    @property
    def breakpoints(self) -> tuple[int, ...]:
        return self.schedule.breakpoints

    @property
    def bounds(self) -> tuple[float, float] | None:
        return _scale_bounds(self.schedule.bounds, self.factor)

    def lengthen(self, times: int) -> Self:
        return dataclasses.replace(self, schedule=self.schedule.lengthen(times))

    def at(self, step):
        return self.schedule(step) * self.factor


@frozen
class JoinedSchedules(Schedule):
    """Schedules one after another: each schedule of `parts` for its number of steps, each from its beginning.

    The steps of the last part may be None: it is not cut off. Otherwise its value stays constant after its steps.

    >>> warmup = optim.LinearSchedule(0.0, 1.0, 2)
    >>> schedule = optim.JoinedSchedules(((warmup, 2), (optim.Cosine(1.0, 4), None)))
    >>> print(schedule.values(7).round(2))
    [0.   0.5  1.   0.85 0.5  0.15 0.  ]
    """

    parts: tuple[tuple[Schedule, int | None], ...]  # (schedule, steps) pairs; None for the last: no end

    def __post_init__(self) -> None:
        pairs = isinstance(self.parts, tuple) and all(isinstance(part, tuple) and len(part) == 2 for part in self.parts)
        if not pairs or not self.parts:
            raise ValueError(
                f"JoinedSchedules: parts is {self.parts!r}, but must be pairs of a schedule and its steps; "
                "pass a tuple of tuples such as ((ConstantSchedule(0.1), 1_000), (Cosine(0.1, 9_000), None))."
            )
        for index, (schedule, steps) in enumerate(self.parts):
            check_schedule(self, schedule)
            is_last = index == len(self.parts) - 1
            if not (is_step_count(steps, 1) or (is_last and steps is None)):
                raise ValueError(
                    f"JoinedSchedules: part {index} has {steps!r} steps, but must have an integer from 1 to "
                    f"{LAST_STEP} or, if it is the last, None; pass an int such as 1_000."
                )
        check_length(self)
        if self._starts[-1] > LAST_STEP:
            raise ValueError(
                f"JoinedSchedules: its last part starts at {self._starts[-1]}, but the last step is {LAST_STEP}; "
                "shorten the parts."
            )

    @property
    def length(self) -> int | None:
        (schedule, steps), start = self.parts[-1], self._starts[-1]
        if schedule.length is None:
            return None if steps is None else start + steps
        return start + (schedule.length if steps is None else min(steps, schedule.length))

    @property
    def breakpoints(self) -> tuple[int, ...]:
        found = set(self._starts[1:])
        for start, (schedule, steps) in zip(self._starts, self.parts, strict=True):
            found.update(start + step for step in schedule.breakpoints if steps is None or step < steps)
        return tuple(sorted(found | ({self.length} if self.length else set())))

    @property
    def bounds(self) -> tuple[float, float] | None:
        return union_bounds(*(schedule.bounds for schedule, _ in self.parts))

    def lengthen(self, times: int) -> Self:
        parts = tuple((schedule.lengthen(times), steps and steps * times) for schedule, steps in self.parts)
        return dataclasses.replace(self, parts=parts)

    def at(self, step):
        value = jnp.zeros(step.shape, jnp.float32)
        for start, (schedule, steps) in zip(self._starts, self.parts, strict=True):
            elapsed = step - start if steps is None else jnp.minimum(step - start, steps)
            value = jnp.where(step >= start, schedule(elapsed), value)
        return value

    @property
    def _starts(self) -> list[int]:
        starts = [0]
        for _, steps in self.parts[:-1]:
            starts.append(starts[-1] + (steps or 0))
        return starts


@frozen
class WarmRestarts(Schedule):
    """Warm restarts: `schedule` repeated `times` times, each time `stretch` times as long and `factor` times as high as
    before.

    SGDR, section 3 of https://arxiv.org/abs/1608.03983, where `stretch` is T_mult and the schedule is Cosine.

    >>> print(optim.WarmRestarts(optim.Cosine(1.0, 3), times=2).values(7).round(2))
    [1.   0.75 0.25 1.   0.75 0.25 0.  ]
    """

    schedule: Schedule  # of the first period
    times: int  # how many periods
    stretch: int = 1  # of the length, from period to period
    factor: float = 1.0  # of the values, from period to period

    def __post_init__(self) -> None:
        check_schedule(self, self.schedule)
        check_steps(self, "times", "stretch")
        check_positive(self, "factor")
        if not self.schedule.length:
            raise ValueError(
                f"WarmRestarts: {self.schedule} has no end to restart at; pass a schedule with a length such as Cosine."
            )
        if self.stretch > 1 and self.times > 31:
            raise ValueError(
                f"WarmRestarts: times is {self.times}, each {self.stretch} times as long as the one before: more "
                "steps than an int32 counts; lower times."
            )
        check_length(self)
        try:
            highest = float(self.factor) ** (self.times - 1)
        except OverflowError:
            highest = float("inf")
        if not is_finite(highest):
            raise ValueError(
                f"WarmRestarts: factor is {self.factor}, which float32 cannot hold after {self.times} times; lower it."
            )

    @property
    def length(self) -> int:
        lengths = self.times if self.stretch == 1 else (self.stretch**self.times - 1) // (self.stretch - 1)
        return self._first_length * lengths

    @property
    def breakpoints(self) -> tuple[int, ...]:
        found: list[int] = []
        start = 0
        for index in range(self.times):
            scale = self.stretch**index
            schedule = self.schedule if scale == 1 else self.schedule.lengthen(scale)
            found += [start + step for step in schedule.breakpoints if step < self._first_length * scale]
            start += self._first_length * scale
            found.append(start)
        return tuple(found)

    @property
    def bounds(self) -> tuple[float, float] | None:
        last = float(self.factor) ** (self.times - 1)
        return union_bounds(self.schedule.bounds, _scale_bounds(self.schedule.bounds, last))

    def lengthen(self, times: int) -> Self:
        return dataclasses.replace(self, schedule=self.schedule.lengthen(times))

    def at(self, step):
        length = self._first_length
        if self.stretch == 1:
            index = jnp.minimum(step // length, self.times - 1)
            return self.schedule(step - index * length) * float(self.factor) ** index.astype(jnp.float32)
        scales = [(self.stretch**index, float(self.factor) ** index) for index in range(self.times)]
        return JoinedSchedules(
            tuple((ScaledSchedule(self.schedule.lengthen(long), high), length * long) for long, high in scales)
        )(step)

    @property
    def _first_length(self) -> int:
        return self.schedule.length or 0  # None is rejected at construction


def _scale_bounds(bounds: tuple[float, float] | None, factor: float) -> tuple[float, float] | None:
    if bounds is None:
        return None
    return min(bound * factor for bound in bounds), max(bound * factor for bound in bounds)
