"""WarmupCosine: a straight way up, half a cosine down."""

import dataclasses

import jax.numpy as jnp

from mlax.core import frozen
from mlax.optim.schedules._between import between, cosine
from mlax.optim.schedules._checks import check_numbers, check_steps
from mlax.optim.schedules._schedule import Schedule


@frozen
class WarmupCosine(Schedule):
    """From `start` to `peak` over `warmup` equal steps, then by half a cosine to `end` at step `total`.

    Section 2.2 of https://arxiv.org/abs/1706.02677, then equation 5 of https://arxiv.org/abs/1608.03983.
    """

    peak: float
    warmup: int
    total: int
    start: float = 0.0
    end: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, "peak", "start", "end")
        check_steps(self, "warmup", least=0)
        check_steps(self, "total")
        if self.warmup >= self.total:
            raise ValueError(
                f"WarmupCosine: warmup is {self.warmup}, but must be less than total, {self.total}, "
                "which counts the warmup too; make total larger."
            )

    @property
    def length(self) -> int:
        return self.total

    @property
    def marks(self) -> tuple[int, ...]:
        return (self.warmup, self.total)

    def stretched(self, times: int) -> "WarmupCosine":
        return dataclasses.replace(self, warmup=self.warmup * times, total=self.total * times)

    def at(self, step):
        rise = between(self.start, self.peak, step, self.warmup - step)
        fall = between(self.peak, self.end, step - self.warmup, self.total - step, cosine)
        return jnp.where(step < self.warmup, rise, fall)
