"""Restarts: a schedule again and again, longer or lower each time."""

import dataclasses

import jax.numpy as jnp

from mlax.core import frozen
from mlax.optim.schedules._checks import check_length, check_positive, check_steps, is_number
from mlax.optim.schedules._joined import Joined
from mlax.optim.schedules._scaled import Scaled
from mlax.optim.schedules._schedule import Schedule, check_schedule


@frozen
class Restarts(Schedule):
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
                f"Restarts: {self.schedule} has no end to restart at; pass a schedule with a length such as Cosine."
            )
        if self.stretch > 1 and self.times > 31:
            raise ValueError(
                f"Restarts: times is {self.times}, each {self.stretch} times as long as the one before, which is more "
                "steps than can be counted; lower times."
            )
        check_length(self)
        try:
            highest = float(self.factor) ** (self.times - 1)
        except OverflowError:
            highest = float("inf")
        if not is_number(highest):
            raise ValueError(
                f"Restarts: factor is {self.factor}, which no float32 holds after {self.times} times; lower it."
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

    def stretched(self, times: int) -> "Restarts":
        return dataclasses.replace(self, schedule=self.schedule.stretched(times))

    def at(self, step):
        if self.stretch == 1:
            done = jnp.minimum(step // self._first, self.times - 1)
            return self.schedule(step - done * self._first) * float(self.factor) ** done.astype(jnp.float32)
        powers = [(self.stretch**time, float(self.factor) ** time) for time in range(self.times)]
        return Joined(
            tuple((Scaled(self.schedule.stretched(each), high), self._first * each) for each, high in powers)
        )(step)

    @property
    def _first(self) -> int:
        return self.schedule.length or 0  # None is refused at construction
