"""Scaled: a schedule times a number."""

import dataclasses

from mlax.core import frozen
from mlax.optim.schedules._checks import check_numbers
from mlax.optim.schedules._schedule import Schedule, check_schedule


@frozen
class Scaled(Schedule):
    """`schedule` times `factor`."""

    schedule: Schedule
    factor: float

    def __post_init__(self) -> None:
        check_schedule(self, self.schedule)
        check_numbers(self, "factor")

    @property
    def length(self) -> int | None:
        return self.schedule.length

    @property
    def marks(self) -> tuple[int, ...]:
        return self.schedule.marks

    def stretched(self, times: int) -> "Scaled":
        return dataclasses.replace(self, schedule=self.schedule.stretched(times))

    def at(self, step):
        return self.schedule(step) * self.factor
