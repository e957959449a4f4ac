"""Exponential: times the same factor again and again."""

import dataclasses
import math

import jax.numpy as jnp

from mlax.core import frozen
from mlax.optim.schedules._checks import LAST, check_numbers, check_positive, check_steps
from mlax.optim.schedules._schedule import Schedule


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
            raise ValueError("Exponential: factor is 1, which changes nothing; use Constant.")
        if self.end is None:
            if self.factor > 1:
                raise ValueError(
                    f"Exponential: factor is {self.factor}, so it grows without bound; pass end=, its ceiling."
                )
            return
        check_numbers(self, "end")
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
        return steps if steps <= LAST else None

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
