"""Cosine: down by half a cosine."""

import dataclasses

from mlax.core import frozen
from mlax.optim.schedules._between import between, cosine
from mlax.optim.schedules._checks import check_numbers, check_steps
from mlax.optim.schedules._schedule import Schedule


@frozen
class Cosine(Schedule):
    """From `start` to `end` over `steps` by half a cosine. Equation 5 of https://arxiv.org/abs/1608.03983."""

    start: float
    steps: int
    end: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, "start", "end")
        check_steps(self, "steps")

    @property
    def length(self) -> int:
        return self.steps

    def stretched(self, times: int) -> "Cosine":
        return dataclasses.replace(self, steps=self.steps * times)

    def at(self, step):
        return between(self.start, self.end, step, self.steps - step, cosine)
