"""Schedule: the base class of all schedules."""

import abc
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlax.core import Documented, frozen
from mlax.optim.schedules._checks import LAST_STEP
from mlax.optim.schedules._plot import format_table, plot, plot_text


@frozen
class Schedule(metaclass=Documented):
    """A learning rate schedule, or another value that depends on the step: `schedule(step)`, where `step` is the number
    of updates so far.

    `step` is an integer or an array of integers; the result is float32 of the same shape. A negative step counts as 0.
    A subclass defines `at`, `length` and `lengthen`; `breakpoints` if it has more than its length; `bounds` if known.
    """

    def __call__(self, step: Any) -> jax.Array:
        return self.at(_as_step(self, step)).astype(jnp.float32)

    @abc.abstractmethod
    def at(self, step: jax.Array) -> jax.Array:
        """The value at `step`, a nonnegative int32 array."""

    @property
    @abc.abstractmethod
    def length(self) -> int | None:
        """The number of steps after which it is constant; None if there is no such number."""

    @abc.abstractmethod
    def lengthen(self, times: int) -> "Schedule":
        """The same curve, `times` times as long."""

    @property
    def breakpoints(self) -> tuple[int, ...]:
        """The steps at which the formula changes, ascending: a table or a plot shows all of them."""
        return (self.length,) if self.length else ()

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Two numbers between which all values lie; None if they are unknown.

        An optimizer checks them at construction; without them, it checks the value at each step.
        """
        return None

    def values(self, steps: Any) -> np.ndarray:
        """The values at the first `steps` steps, or at an array of steps: float32."""
        if isinstance(steps, int):
            if steps < 0:
                raise ValueError(f"{self}: steps is {steps}, but must be at least 0; pass how many values you want.")
            steps = np.arange(steps)
        return np.asarray(jax.jit(self)(_as_step(self, steps)))

    def table(self, steps: int | None = None, rows: int = 11) -> str:
        """A table of values at `rows` evenly spaced steps from 0 to `steps`, and at the breakpoints.

        `steps=None` is the length.
        """
        return format_table(self, steps, rows)

    def plot_text(self, steps: int | None = None, width: int = 60, height: int = 8) -> str:
        """A plot from step 0 to `steps` as text, of `width` by `height` characters, for a terminal.

        `steps=None` is the length.
        """
        return plot_text(self, steps, width, height)

    def plot(self, path: str | os.PathLike[str], steps: int | None = None) -> None:
        """Write a plot from step 0 to `steps` to an image file, in the format of its suffix. Needs matplotlib.

        `steps=None` is the length.
        """
        plot(self, path, steps)


def check_schedule(schedule: Schedule, value: Any) -> None:
    """Check that a field is a schedule."""
    if not isinstance(value, Schedule):
        raise TypeError(
            f"{type(schedule).__name__}: {value!r} is not a schedule; "
            "pass one such as ConstantSchedule(3e-4) or Cosine(3e-4, 1_000)."
        )


def union_bounds(*bounds: tuple[float, float] | None) -> tuple[float, float] | None:
    """The bounds of a schedule that takes the values of several; None if one of them is unknown."""
    known = [each for each in bounds if each is not None]
    if len(known) < len(bounds):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def _as_step(schedule: Schedule, step: Any) -> jax.Array:
    """The step as int32 from 0 to LAST_STEP, clipped where a wider integer would wrap around."""
    step = step if isinstance(step, jax.Array) else np.asarray(step)
    if not jnp.issubdtype(step.dtype, jnp.integer):
        raise TypeError(
            f"{schedule}: the step is {step.dtype}, but must be an integer, since float32 is exact only up to 2**24; "
            "pass an int or an int32 array."
        )
    if jnp.iinfo(step.dtype).max > LAST_STEP:
        step = step.clip(max=LAST_STEP)
    return jnp.maximum(jnp.asarray(step, jnp.int32), 0)
