"""WarmupStableDecay: a straight way up, a plain, a way down at the very end."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from mlax.core import frozen
from mlax.optim.schedules._between import between, cosine, linear, root
from mlax.optim.schedules._checks import check_numbers, check_steps
from mlax.optim.schedules._schedule import Schedule

SHAPES = {"linear": linear, "cosine": cosine, "root": root}


@frozen
class WarmupStableDecay(Schedule):
    """From `start` to `peak` over `warmup` equal steps, level, then to `end` over the last `decay` of `total` steps.

    Section 4 of https://arxiv.org/abs/2404.06395. The shape is of the way down; "root" is 1 - sqrt, section 3 of
    https://arxiv.org/abs/2405.18392.
    """

    peak: float
    warmup: int
    total: int
    decay: int
    start: float = 0.0
    end: float = 0.0
    shape: Literal["linear", "cosine", "root"] = "linear"

    def __post_init__(self) -> None:
        check_numbers(self, "peak", "start", "end")
        check_steps(self, "warmup", least=0)
        check_steps(self, "total", "decay")
        if self.shape not in SHAPES:
            raise ValueError(
                f"WarmupStableDecay: shape is {self.shape!r}, but must be one of {', '.join(SHAPES)}; pass one of them."
            )
        if self.warmup + self.decay > self.total:
            raise ValueError(
                f"WarmupStableDecay: warmup and decay are {self.warmup} and {self.decay}, together more than "
                f"total, {self.total}, which counts both; make total larger."
            )

    @property
    def length(self) -> int:
        return self.total

    @property
    def marks(self) -> tuple[int, ...]:
        return (self.warmup, self.total - self.decay, self.total)

    def stretched(self, times: int) -> "WarmupStableDecay":
        return dataclasses.replace(self, warmup=self.warmup * times, total=self.total * times, decay=self.decay * times)

    def at(self, step):
        turn = self.total - self.decay
        rise = between(self.start, self.peak, step, self.warmup - step)
        fall = between(self.peak, self.end, step - turn, self.total - step, SHAPES[self.shape])
        return jnp.where(step < turn, rise, fall)
