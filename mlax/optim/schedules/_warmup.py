"""Schedules that begin with a warm-up: Warmup, WarmupCosine, WarmupStableDecay, InverseSqrt, OneCycle."""

import dataclasses
from typing import Literal, Self

import jax.numpy as jnp

from mlax.core import frozen
from mlax.optim.schedules._base import Schedule, check_schedule, union_bounds
from mlax.optim.schedules._checks import check_finite, check_length, check_positive, check_steps, is_finite
from mlax.optim.schedules._curves import cosine, interpolate, linear, square_root

SHAPES = {"linear": linear, "cosine": cosine, "root": square_root}


@frozen
class Warmup(Schedule):
    """A linear warm-up: from `start` to the first value of `schedule` in `steps` equal steps, then `schedule` from its
    beginning.

    Section 2.2 of https://arxiv.org/abs/1706.02677

    >>> print(optim.Warmup(optim.Exponential(1.0, 0.5), steps=2).values(7).round(2))
    [0.   0.5  1.   0.5  0.25 0.12 0.06]
    """

    schedule: Schedule  # what follows
    steps: int  # of the warm-up
    start: float = 0.0  # the first value

    def __post_init__(self) -> None:
        check_schedule(self, self.schedule)
        check_steps(self, "steps", minimum=0)
        check_finite(self, "start")
        check_length(self)

    @property
    def length(self) -> int | None:
        return None if self.schedule.length is None else self.steps + self.schedule.length

    @property
    def breakpoints(self) -> tuple[int, ...]:
        return (self.steps, *(self.steps + step for step in self.schedule.breakpoints))

    @property
    def bounds(self) -> tuple[float, float] | None:
        return union_bounds(self.schedule.bounds, (self.start, self.start)) if self.steps else self.schedule.bounds

    def lengthen(self, times: int) -> Self:
        return dataclasses.replace(self, schedule=self.schedule.lengthen(times), steps=self.steps * times)

    def at(self, step):
        warmup = interpolate(self.start, self.schedule(0), step, self.steps - step)
        return jnp.where(step < self.steps, warmup, self.schedule(step - self.steps))


@frozen
class WarmupCosine(Schedule):
    """Learning rate warm-up and cosine decay: from `start` to `peak` in `warmup` equal steps, then by half a cosine to
    `end` at step `total`.

    Section 2.2 of https://arxiv.org/abs/1706.02677, then equation 5 of https://arxiv.org/abs/1608.03983

    >>> print(optim.WarmupCosine(1.0, warmup=2, total=6).values(7).round(2))
    [0.   0.5  1.   0.85 0.5  0.15 0.  ]
    """

    peak: float  # the highest value, after the warm-up
    warmup: int  # steps of a linear warm-up
    total: int  # steps in all, the warm-up included
    start: float = 0.0  # the first value
    end: float = 0.0  # the last value

    def __post_init__(self) -> None:
        check_finite(self, "peak", "start", "end")
        check_steps(self, "warmup", minimum=0)
        check_steps(self, "total")
        if self.warmup >= self.total:
            raise ValueError(
                f"WarmupCosine: warmup is {self.warmup}, but must be less than total, {self.total}, "
                "which includes the warm-up; raise total."
            )

    @property
    def length(self) -> int:
        return self.total

    @property
    def breakpoints(self) -> tuple[int, ...]:
        return (self.warmup, self.total)

    @property
    def bounds(self) -> tuple[float, float]:
        return _bounds_of(self.peak, self.end, self.start if self.warmup else self.peak)

    def lengthen(self, times: int) -> Self:
        return dataclasses.replace(self, warmup=self.warmup * times, total=self.total * times)

    def at(self, step):
        warmup = interpolate(self.start, self.peak, step, self.warmup - step)
        decay = interpolate(self.peak, self.end, step - self.warmup, self.total - step, cosine)
        return jnp.where(step < self.warmup, warmup, decay)


@frozen
class WarmupStableDecay(Schedule):
    """Warm-up, stable, decay (WSD): from `start` to `peak` in `warmup` equal steps, constant, then to `end` over the
    last `decay` of `total` steps.

    Section 4 of https://arxiv.org/abs/2404.06395. `shape` is that of the decay; "root" is 1 - sqrt, section 3 of
    https://arxiv.org/abs/2405.18392

    >>> print(optim.WarmupStableDecay(1.0, warmup=2, total=6, decay=2).values(7).round(2))
    [0.  0.5 1.  1.  1.  0.5 0. ]
    """

    peak: float  # the highest value, after the warm-up
    warmup: int  # steps of a linear warm-up
    total: int  # steps in all, the warm-up included
    decay: int  # the last steps, in which it decreases
    start: float = 0.0  # the first value
    end: float = 0.0  # the last value
    shape: Literal["linear", "cosine", "root"] = "linear"  # of the decrease: "linear", "cosine" or "root"

    def __post_init__(self) -> None:
        check_finite(self, "peak", "start", "end")
        check_steps(self, "warmup", minimum=0)
        check_steps(self, "total", "decay")
        if self.shape not in SHAPES:
            raise ValueError(
                f"WarmupStableDecay: shape is {self.shape!r}, but must be one of {', '.join(SHAPES)}; pass one of them."
            )
        if self.warmup + self.decay > self.total:
            raise ValueError(
                f"WarmupStableDecay: warmup and decay are {self.warmup} and {self.decay}, together more than "
                f"total, {self.total}, which includes both; raise total."
            )

    @property
    def length(self) -> int:
        return self.total

    @property
    def breakpoints(self) -> tuple[int, ...]:
        return (self.warmup, self.total - self.decay, self.total)

    @property
    def bounds(self) -> tuple[float, float]:
        return _bounds_of(self.peak, self.end, self.start if self.warmup else self.peak)

    def lengthen(self, times: int) -> Self:
        return dataclasses.replace(self, warmup=self.warmup * times, total=self.total * times, decay=self.decay * times)

    def at(self, step):
        decay_start = self.total - self.decay
        warmup = interpolate(self.start, self.peak, step, self.warmup - step)
        decay = interpolate(self.peak, self.end, step - decay_start, self.total - step, SHAPES[self.shape])
        return jnp.where(step < decay_start, warmup, decay)


@frozen
class InverseSqrt(Schedule):
    """Inverse square root decay after a warm-up: from 0 to `peak` in `warmup` equal steps, then `peak * sqrt(warmup /
    step)`.

    Equation 3 of https://arxiv.org/abs/1706.03762, where `peak` is `(width * warmup) ** -0.5`.

    >>> print(optim.InverseSqrt(1.0, warmup=2).values(7).round(2))
    [0.   0.5  1.   0.82 0.71 0.63 0.58]
    """

    peak: float  # the highest value, after the warm-up
    warmup: int  # steps of a linear warm-up

    def __post_init__(self) -> None:
        check_finite(self, "peak")
        check_steps(self, "warmup")

    @property
    def length(self) -> None:
        return None

    @property
    def breakpoints(self) -> tuple[int, ...]:
        return (self.warmup,)

    @property
    def bounds(self) -> tuple[float, float]:
        return _bounds_of(0.0, self.peak)

    def lengthen(self, times: int) -> Self:
        return dataclasses.replace(self, warmup=self.warmup * times)

    def at(self, step):
        warmup = interpolate(0.0, self.peak, step, self.warmup - step)
        decay = self.peak * jnp.sqrt(self.warmup / jnp.maximum(step, self.warmup).astype(jnp.float32))
        return jnp.where(step <= self.warmup, warmup, decay)


@frozen
class OneCycle(Schedule):
    """The one-cycle policy: from `peak / div_factor` up to `peak`, then down to `peak / div_factor / final_div_factor`,
    by cosines.

    The rise takes the fraction `pct_start` of `total`. The last value is at step `total - 1`, the last update, and the
    peak at step `pct_start * total - 1`, which need not be an integer: PyTorch's OneCycleLR with two phases. https://arxiv.org/abs/1708.07120

    >>> print(optim.OneCycle(1.0, total=6).values(7).round(2))
    [0.04 0.99 0.81 0.46 0.13 0.   0.  ]
    """

    peak: float  # the highest value, after the warm-up
    total: int  # steps in all, the warm-up included
    pct_start: float = 0.3  # the fraction of steps that it rises
    div_factor: float = 25.0  # the peak over the first value
    final_div_factor: float = 1e4  # the first value over the last

    def __post_init__(self) -> None:
        check_finite(self, "peak")
        check_steps(self, "total", minimum=2)
        check_positive(self, "pct_start", "div_factor", "final_div_factor")
        if not 1 / self.total < self.pct_start < 1:
            raise ValueError(
                f"OneCycle: pct_start is {self.pct_start} of {self.total} steps, but must be less than all of them "
                "and more than one step; pass a fraction such as 0.3."
            )
        start, end = self.peak / self.div_factor, self.peak / self.div_factor / self.final_div_factor
        if not (is_finite(start) and is_finite(end)):
            raise ValueError(
                f"OneCycle: it starts at {start} and ends at {end}, which float32 cannot hold; raise "
                "div_factor or final_div_factor."
            )

    @property
    def length(self) -> int:
        return self.total - 1

    @property
    def breakpoints(self) -> tuple[int, ...]:
        return tuple(sorted({int(self._peak_step), -int(-self._peak_step // 1), self.total - 1}))

    @property
    def bounds(self) -> tuple[float, float]:
        start = self.peak / self.div_factor
        return _bounds_of(self.peak, start, start / self.final_div_factor)

    def lengthen(self, times: int) -> Self:
        total = (self.total - 1) * times + 1
        return dataclasses.replace(self, total=total, pct_start=(self._peak_step * times + 1) / total)

    def at(self, step):
        start, before_peak = self.peak / self.div_factor, int(self._peak_step)
        past_peak = (step - before_peak).astype(jnp.float32) - (self._peak_step - before_peak)
        rise = interpolate(start, self.peak, step, -past_peak, cosine)
        decay = interpolate(self.peak, start / self.final_div_factor, past_peak, self.total - 1 - step, cosine)
        return jnp.where(step <= before_peak, rise, decay)

    @property
    def _peak_step(self) -> float:
        return self.pct_start * self.total - 1


def _bounds_of(*values: float) -> tuple[float, float]:
    return min(values), max(values)
