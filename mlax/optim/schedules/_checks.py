"""Checks of the fields of schedules: finite float32 values, and step counts that fit into int32."""

from typing import Any

import numpy as np

LAST_STEP = 2**31 - 1  # steps are int32
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def check_finite(schedule: Any, *names: str) -> None:
    """Check that fields are finite in float32."""
    for name in names:
        value = getattr(schedule, name)
        if not is_finite(value):
            raise ValueError(
                f"{type(schedule).__name__}: {name} is {value!r}, but must be a finite float32 number; "
                "pass one such as 3e-4."
            )


def check_positive(schedule: Any, *names: str) -> None:
    """Check that fields are finite and above 0."""
    check_finite(schedule, *names)
    for name in names:
        value = getattr(schedule, name)
        if value <= 0:
            raise ValueError(
                f"{type(schedule).__name__}: {name} is {value!r}, but must be more than 0; pass a positive number."
            )


def check_steps(schedule: Any, *names: str, minimum: int = 1) -> None:
    """Check that fields are step counts of at least `least`."""
    for name in names:
        value = getattr(schedule, name)
        if not is_step_count(value, minimum):
            raise ValueError(
                f"{type(schedule).__name__}: {name} is {value!r}, but must be an integer from {minimum} to "
                f"{LAST_STEP}; pass an int such as 1_000."
            )


def check_length(schedule: Any) -> None:
    """Check that a schedule made of others ends within the steps of an int32."""
    if schedule.length is not None and schedule.length > LAST_STEP:
        raise ValueError(
            f"{type(schedule).__name__}: it has {schedule.length} steps, but the last step is {LAST_STEP}; shorten it."
        )


def is_finite(value: Any) -> bool:
    """Whether it is a number within the range of float32."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_FLOAT32


def is_step_count(value: Any, minimum: int) -> bool:
    """Whether it is an integer from `least` to the last step."""
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= LAST_STEP
