"""Steps: one value until a step, another until the next."""

import dataclasses
import itertools

import jax.numpy as jnp

from mlax.core import frozen
from mlax.optim.schedules._checks import check_numbers, is_number, is_whole
from mlax.optim.schedules._schedule import Schedule


@frozen
class Steps(Schedule):
    """`start`, and from each step of `drops` on times its factor: drops=((30_000, 0.1), (60_000, 0.1))."""

    start: float
    drops: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        check_numbers(self, "start")
        pairs = isinstance(self.drops, tuple) and all(isinstance(drop, tuple) and len(drop) == 2 for drop in self.drops)
        if not pairs or not self.drops:
            raise ValueError(
                f"Steps: drops is {self.drops!r}, but must be pairs of a step and a factor; "
                "pass a tuple of tuples such as ((30_000, 0.1), (60_000, 0.1))."
            )
        for drop in self.drops:
            if not (is_whole(drop[0], 1) and is_number(drop[1])):
                raise ValueError(
                    f"Steps: one of the drops is {drop!r}, but must be a step from 1 on and a finite factor; "
                    "pass a pair such as (30_000, 0.1)."
                )
        if any(after <= before for before, after in itertools.pairwise(self.marks)):
            raise ValueError(f"Steps: the drops are at {self.marks}, but must be in ascending order; sort them.")
        for step, value in zip(self.marks, self._after, strict=True):
            if not is_number(value):
                raise ValueError(f"Steps: from step {step} on it is {value}, which no float32 holds; lower a factor.")

    @property
    def length(self) -> int:
        return self.drops[-1][0]

    @property
    def marks(self) -> tuple[int, ...]:
        return tuple(step for step, _ in self.drops)

    def stretched(self, times: int) -> "Steps":
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
