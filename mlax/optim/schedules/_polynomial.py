"""Linear and Polynomial: from one value to another by a power of the steps left."""

import dataclasses

from mlax.core import frozen
from mlax.optim.schedules._between import between
from mlax.optim.schedules._checks import check_numbers, check_positive, check_steps
from mlax.optim.schedules._schedule import Schedule


@frozen
class Linear(Schedule):
    """From `start` to `end` in `steps` equal steps."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        check_numbers(self, "start", "end")
        check_steps(self, "steps")

    @property
    def length(self) -> int:
        return self.steps

    def stretched(self, times: int) -> "Linear":
        return dataclasses.replace(self, steps=self.steps * times)

    def at(self, step):
        return between(self.start, self.end, step, self.steps - step)


@frozen
class Polynomial(Schedule):
    """From `start` to `end` over `steps`: end + (start - end) * (1 - step / steps) ** power."""

    start: float
    end: float
    steps: int
    power: float = 2.0

    def __post_init__(self) -> None:
        check_numbers(self, "start", "end")
        check_steps(self, "steps")
        check_positive(self, "power")

    @property
    def length(self) -> int:
        return self.steps

    def stretched(self, times: int) -> "Polynomial":
        return dataclasses.replace(self, steps=self.steps * times)

    def at(self, step):
        return between(self.start, self.end, step, self.steps - step, self._weights)

    def _weights(self, gone, left):
        of_start = left ** float(self.power)
        return 1 - of_start, of_start
