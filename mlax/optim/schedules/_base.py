"""Schedule: the base class of all schedules."""

import abc
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlax.core import frozen
from mlax.optim.schedules._checks import LAST_STEP
from mlax.optim.schedules._plot import format_table, plot, plot_text


@frozen
class Schedule(abc.ABC):
    """A number that changes with the step: `schedule(step)`, where step counts the updates made so far.

    A whole number or an array of them, of any shape, to float32 of that shape. A negative step counts as 0.
    A subclass writes `at`, `length` and `stretched`, and `marks` where it has more of them than its length.
    """

    def __call__(self, step: Any) -> jax.Array:
        return self.at(_as_step(self, step)).astype(jnp.float32)

    @abc.abstractmethod
    def at(self, step: jax.Array) -> jax.Array:
        """The value at `step`, which is int32 and not negative."""

    @property
    @abc.abstractmethod
    def length(self) -> int | None:
        """The number of steps after which it no longer changes; None if it goes on for ever."""

    @abc.abstractmethod
    def stretched(self, times: int) -> "Schedule":
        """The same curve, `times` as long."""

    @property
    def marks(self) -> tuple[int, ...]:
        """The steps at which its course changes, ascending: what a table or a picture must not leave out."""
        return (self.length,) if self.length else ()

    def values(self, steps: Any) -> np.ndarray:
        """The values at the first `steps` steps, or at the given steps if it is an array: float32."""
        if isinstance(steps, int):
            if steps < 0:
                raise ValueError(f"{self}: steps is {steps}, but must be at least 0; pass how many values you want.")
            steps = np.arange(steps)
        return np.asarray(jax.jit(self)(_as_step(self, steps)))

    def table(self, steps: int | None = None, rows: int = 11) -> str:
        """Steps and values in two columns: `rows` even ones from 0 to `steps`, and the marks.

        Where `steps` is None it is the length.
        """
        return format_table(self, steps, rows)

    def curve(self, steps: int | None = None, width: int = 60, height: int = 8) -> str:
        """The curve from 0 to `steps` as text, with the largest and the smallest value on the left.

        Where `steps` is None it is the length. `width` and `height` are in characters.
        """
        return plot_text(self, steps, width, height)

    def draw(self, path: str | os.PathLike[str], steps: int | None = None) -> None:
        """Write the curve from 0 to `steps` as a picture, of the kind that the name of the file says.

        Where `steps` is None it is the length. Needs matplotlib.
        """
        plot(self, path, steps)


def check_schedule(schedule: Schedule, value: Any) -> None:
    """Refuse what is no schedule where one is wanted."""
    if not isinstance(value, Schedule):
        raise TypeError(
            f"{type(schedule).__name__}: {value!r} stands where a schedule must stand; "
            "pass one such as ConstantSchedule(3e-4) or Cosine(3e-4, 1_000)."
        )


def _as_step(schedule: Schedule, step: Any) -> jax.Array:
    """The step as int32 from 0 to LAST, where a wider one would wrap round."""
    step = step if isinstance(step, jax.Array) else np.asarray(step)
    if not jnp.issubdtype(step.dtype, jnp.integer):
        raise TypeError(
            f"{schedule}: the step is {step.dtype}, but must be an integer, since a float32 counts no further "
            "than 2**24; pass an int or an int32 array."
        )
    if jnp.iinfo(step.dtype).max > LAST_STEP:
        step = step.clip(max=LAST_STEP)
    return jnp.maximum(jnp.asarray(step, jnp.int32), 0)
