"""Joined: one schedule after another."""

import dataclasses

import jax.numpy as jnp

from mlax.core import frozen
from mlax.optim.schedules._checks import LAST, check_length, is_whole
from mlax.optim.schedules._schedule import Schedule, check_schedule


@frozen
class Joined(Schedule):
    """Each schedule of `parts` for its number of steps, counted from its own beginning.

    The steps of the last part may be None: it is not cut off. Otherwise it stops where its steps end.
    """

    parts: tuple[tuple[Schedule, int | None], ...]

    def __post_init__(self) -> None:
        pairs = isinstance(self.parts, tuple) and all(isinstance(part, tuple) and len(part) == 2 for part in self.parts)
        if not pairs or not self.parts:
            raise ValueError(
                f"Joined: parts is {self.parts!r}, but must be pairs of a schedule and its steps; "
                "pass a tuple of tuples such as ((Constant(0.1), 1_000), (Cosine(0.1, 9_000), None))."
            )
        for index, (schedule, steps) in enumerate(self.parts):
            check_schedule(self, schedule)
            is_last = index == len(self.parts) - 1
            if not (is_whole(steps, 1) or (is_last and steps is None)):
                raise ValueError(
                    f"Joined: part {index} has {steps!r} steps, but must have a whole number from 1 to {LAST}, "
                    "or, if it is the last, None; pass an int such as 1_000."
                )
        check_length(self)
        if self._beginnings[-1] > LAST:
            raise ValueError(
                f"Joined: its last part begins at {self._beginnings[-1]}, but a step counts to {LAST} at most; "
                "make the parts shorter."
            )

    @property
    def length(self) -> int | None:
        (schedule, steps), beginning = self.parts[-1], self._beginnings[-1]
        if schedule.length is None:
            return None if steps is None else beginning + steps
        return beginning + (schedule.length if steps is None else min(steps, schedule.length))

    @property
    def marks(self) -> tuple[int, ...]:
        found = set(self._beginnings[1:])
        for beginning, (schedule, steps) in zip(self._beginnings, self.parts, strict=True):
            found.update(beginning + mark for mark in schedule.marks if steps is None or mark < steps)
        return tuple(sorted(found | ({self.length} if self.length else set())))

    def stretched(self, times: int) -> "Joined":
        return dataclasses.replace(
            self,
            parts=tuple((schedule.stretched(times), steps and steps * times) for schedule, steps in self.parts),
        )

    def at(self, step):
        value = jnp.zeros(step.shape, jnp.float32)
        for beginning, (schedule, steps) in zip(self._beginnings, self.parts, strict=True):
            own = step - beginning if steps is None else jnp.minimum(step - beginning, steps)
            value = jnp.where(step >= beginning, schedule(own), value)
        return value

    @property
    def _beginnings(self) -> list[int]:
        beginnings = [0]
        for _, steps in self.parts[:-1]:
            beginnings.append(beginnings[-1] + (steps or 0))
        return beginnings
