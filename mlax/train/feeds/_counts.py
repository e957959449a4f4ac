"""Counts: the whole numbers that a caller gives, checked."""

import operator
from typing import Any

import numpy as np

from mlax.core import signature


def at_least(least: int, value: Any, name: str) -> int:
    """`value` as an int, if it is one and not too small."""
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # an array has an index too, but only one of a single int can give it
        count = None
    if count is None or count < least:
        what = repr(value) if np.isscalar(value) else signature(value)
        raise ValueError(f"{name} is {what} but is to be an int of at least {least}.")
    return count


def first_step(start: int | None, position: dict[str, Any] | None, what: str) -> int:
    """The step that a stream begins with, from `start` or a `position` or both."""
    start = None if start is None else at_least(0, start, f"{what}: start")
    if position is None:
        return start or 0
    if not isinstance(position, dict) or not isinstance(position.get("step"), int):
        raise TypeError(f'{what}: position is {position!r} but is to be what stream.position() gave: {{"step": 7}}.')
    if start is not None and start != position["step"]:
        raise ValueError(
            f"{what}: start is {start:,} but position is that of step {position['step']:,}; "
            "give one of them, or the position that was saved with this step."
        )
    return position["step"]


def calls(start: int, stop: int | None, stacked: int, what: str) -> int | None:
    """How many times a stream gives `stacked` batches between two steps; None is without end."""
    stacked = at_least(1, stacked, f"{what}: stacked")
    if stop is None:
        return None
    stop = at_least(0, stop, f"{what}: stop")
    if stop > start and (stop - start) % stacked:
        raise ValueError(
            f"{what}: the {stop - start:,} steps from {start:,} to {stop:,} are not a multiple of stacked={stacked}, "
            f"and a shorter last stack would compile anew; stop at {stop - (stop - start) % stacked:,} and go on with "
            "stacked=1."
        )
    return max(0, stop - start) // stacked
