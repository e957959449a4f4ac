"""Warmup: a straight way up to where another schedule begins."""

import dataclasses

import jax.numpy as jnp

from mlax.core import frozen
from mlax.optim.schedules._between import between
from mlax.optim.schedules._checks import check_length, check_numbers, check_steps
from mlax.optim.schedules._schedule import Schedule, check_schedule


@frozen
class Warmup(Schedule):
    """From `start` to the first value of `schedule` in `steps` equal steps, then `schedule`, counted from there.

    Section 2.2 of https://arxiv.org/abs/1706.02677.
    """

    schedule: Schedule
    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        check_schedule(self, self.schedule)
        check_steps(self, "steps", least=0)
        check_numbers(self, "start")
        check_length(self)

    @property
    def length(self) -> int | None:
        return None if self.schedule.length is None else self.steps + self.schedule.length

    @property
    def marks(self) -> tuple[int, ...]:
        return (self.steps, *(self.steps + mark for mark in self.schedule.marks))

    def stretched(self, times: int) -> "Warmup":
        return dataclasses.replace(self, schedule=self.schedule.stretched(times), steps=self.steps * times)

    def at(self, step):
        rise = between(self.start, self.schedule(0), step, self.steps - step)
        return jnp.where(step < self.steps, rise, self.schedule(step - self.steps))
