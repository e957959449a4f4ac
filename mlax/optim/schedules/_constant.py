"""Constant: one number at every step."""

import jax.numpy as jnp

from mlax.core import frozen
from mlax.optim.schedules._checks import check_numbers
from mlax.optim.schedules._schedule import Schedule


@frozen
class Constant(Schedule):
    """`value` at every step."""

    value: float

    def __post_init__(self) -> None:
        check_numbers(self, "value")

    @property
    def length(self) -> int:
        return 0

    def stretched(self, times: int) -> "Constant":
        return self

    def at(self, step):
        return jnp.full(step.shape, self.value, jnp.float32)
