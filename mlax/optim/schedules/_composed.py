"""Schedules made of schedules: ScaledSchedule, JoinedSchedules, WarmRestarts."""

import dataclasses

import jax.numpy as jnp

from mlax.core import frozen
from mlax.optim.schedules._base import Schedule, check_schedule
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
    """`schedule` times `factor`."""

    schedule: Schedule
    factor: float

    def __post_init__(self) -> None:
        check_schedule(self, self.schedule)
        check_finite(self, "factor")

    @property
    def length(self) -> int | None:
        return self.schedule.length

    @property
    def marks(self) -> tuple[int, ...]:
        return self.schedule.marks

    def stretched(self, times: int) -> "ScaledSchedule":
        return dataclasses.replace(self, schedule=self.schedule.stretched(times))

    def at(self, step):
        return self.schedule(step) * self.factor


@frozen
class JoinedSchedules(Schedule):
    """Each schedule of `parts` for its number of steps, counted from its own beginning.

    The steps of the last part may be None: it is not cut off. Otherwise it stops where its steps end.
    """

    parts: tuple[tuple[Schedule, int | None], ...]

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
        if self._beginnings[-1] > LAST_STEP:
            raise ValueError(
                f"JoinedSchedules: its last part begins at {self._beginnings[-1]}, but the last step is {LAST_STEP}; "
                "shorten the parts."
            )

    @property
    def length(self) -> int | None:
        (schedule, steps), beginning = self.parts[-1], self._beginnings[-1]
        if schedule.length is None:
            return None if steps is None else beginning + steps
        return beginning + (schedule.length if steps is None else min(steps, schedule.length))

    @property
    def marks(self) -> tuple[int, ...]:
        found = set(self._beginnings[1:])
        for beginning, (schedule, steps) in zip(self._beginnings, self.parts, strict=True):
            found.update(beginning + mark for mark in schedule.marks if steps is None or mark < steps)
        return tuple(sorted(found | ({self.length} if self.length else set())))

    def stretched(self, times: int) -> "JoinedSchedules":
        return dataclasses.replace(
            self,
            parts=tuple((schedule.stretched(times), steps and steps * times) for schedule, steps in self.parts),
        )

    def at(self, step):
        value = jnp.zeros(step.shape, jnp.float32)
        for beginning, (schedule, steps) in zip(self._beginnings, self.parts, strict=True):
            own = step - beginning if steps is None else jnp.minimum(step - beginning, steps)
            value = jnp.where(step >= beginning, schedule(own), value)
        return value

    @property
    def _beginnings(self) -> list[int]:
        beginnings = [0]
        for _, steps in self.parts[:-1]:
            beginnings.append(beginnings[-1] + (steps or 0))
        return beginnings


@frozen
class WarmRestarts(Schedule):
    """`schedule` run `times` times, each time `stretch` times as long and `factor` times as high as the time before.

    SGDR, https://arxiv.org/abs/1608.03983, where stretch is T_mult and the schedule is Cosine.
    """

    schedule: Schedule
    times: int
    stretch: int = 1
    factor: float = 1.0

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
                f"WarmRestarts: factor is {self.factor}, which no float32 holds after {self.times} times; lower it."
            )

    @property
    def length(self) -> int:
        lengths = self.times if self.stretch == 1 else (self.stretch**self.times - 1) // (self.stretch - 1)
        return self._first * lengths

    @property
    def marks(self) -> tuple[int, ...]:
        found: list[int] = []
        beginning = 0
        for time in range(self.times):
            each = self.stretch**time
            marks = (self.schedule if each == 1 else self.schedule.stretched(each)).marks
            found += [beginning + mark for mark in marks if mark < self._first * each]
            beginning += self._first * each
            found.append(beginning)
        return tuple(found)

    def stretched(self, times: int) -> "WarmRestarts":
        return dataclasses.replace(self, schedule=self.schedule.stretched(times))

    def at(self, step):
        if self.stretch == 1:
            done = jnp.minimum(step // self._first, self.times - 1)
            return self.schedule(step - done * self._first) * float(self.factor) ** done.astype(jnp.float32)
        powers = [(self.stretch**time, float(self.factor) ** time) for time in range(self.times)]
        return JoinedSchedules(
            tuple((ScaledSchedule(self.schedule.stretched(each), high), self._first * each) for each, high in powers)
        )(step)

    @property
    def _first(self) -> int:
        return self.schedule.length or 0  # None is refused at construction
