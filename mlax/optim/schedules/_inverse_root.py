"""InverseRoot: a straight way up, then down by the root of the step, for ever."""

import dataclasses

import jax.numpy as jnp

from mlax.core import frozen
from mlax.optim.schedules._between import between
from mlax.optim.schedules._checks import check_numbers, check_steps
from mlax.optim.schedules._schedule import Schedule


@frozen
class InverseRoot(Schedule):
    """From 0 to `peak` over `warmup` equal steps, then peak * sqrt(warmup / step).

    Equation 3 of https://arxiv.org/abs/1706.03762, where peak is (width * warmup) ** -0.5.
    """

    peak: float
    warmup: int

    def __post_init__(self) -> None:
        check_numbers(self, "peak")
        check_steps(self, "warmup")

    @property
    def length(self) -> None:
        return None

    @property
    def marks(self) -> tuple[int, ...]:
        return (self.warmup,)

    def stretched(self, times: int) -> "InverseRoot":
        return dataclasses.replace(self, warmup=self.warmup * times)

    def at(self, step):
        rise = between(0.0, self.peak, step, self.warmup - step)
        fall = self.peak * jnp.sqrt(self.warmup / jnp.maximum(step, self.warmup).astype(jnp.float32))
        return jnp.where(step <= self.warmup, rise, fall)
