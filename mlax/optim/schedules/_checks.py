"""What a schedule may hold: finite numbers and whole numbers of steps."""

from typing import Any

import numpy as np

LAST = 2**31 - 1  # steps are int32
LARGEST = float(np.finfo(np.float32).max)


def check_numbers(schedule: Any, *names: str) -> None:
    """Refuse fields that are no finite float32 numbers."""
    for name in names:
        value = getattr(schedule, name)
        if not is_number(value):
            raise ValueError(
                f"{type(schedule).__name__}: {name} is {value!r}, but must be a finite float32 number; "
                "pass one such as 3e-4."
            )


def check_positive(schedule: Any, *names: str) -> None:
    """Refuse fields that are no finite numbers above 0."""
    check_numbers(schedule, *names)
    for name in names:
        value = getattr(schedule, name)
        if value <= 0:
            raise ValueError(
                f"{type(schedule).__name__}: {name} is {value!r}, but must be more than 0; pass a positive number."
            )


def check_steps(schedule: Any, *names: str, least: int = 1) -> None:
    """Refuse fields that are no whole numbers of steps."""
    for name in names:
        value = getattr(schedule, name)
        if not is_whole(value, least):
            raise ValueError(
                f"{type(schedule).__name__}: {name} is {value!r}, but must be a whole number from {least} to {LAST}; "
                "pass an int such as 1_000."
            )


def check_length(schedule: Any) -> None:
    """Refuse a schedule whose parts together last longer than a step can count."""
    if schedule.length is not None and schedule.length > LAST:
        raise ValueError(
            f"{type(schedule).__name__}: it lasts {schedule.length} steps, but a step counts to {LAST} at most; "
            "make it shorter."
        )


def is_number(value: Any) -> bool:
    """Whether it is a number that float32 can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_whole(value: Any, least: int) -> bool:
    """Whether it is a whole number of at least `least` that a step can reach."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LAST
