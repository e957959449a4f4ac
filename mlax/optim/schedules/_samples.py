"""samples: the steps at which a schedule is looked at."""

from typing import Any

import numpy as np

from mlax.optim.schedules._checks import LAST, is_whole


def samples(schedule: Any, steps: int | None, count: int, *, sides: bool = False) -> np.ndarray:
    """About `count` even steps from 0 to `steps` and the marks among them, with their left sides if wanted.

    Where `steps` is None it is the length. Of more than `count` marks only `count` are taken.
    """
    if steps is None and schedule.length is None:
        raise ValueError(f"{schedule}: it goes on for ever; pass steps=, how many of them to show.")
    last = max(1, schedule.length) if steps is None else steps
    if not is_whole(last, 1):
        raise ValueError(f"{schedule}: steps is {steps!r}, but must be a whole number from 1 to {LAST}; pass an int.")
    marks = np.asarray([mark for mark in schedule.marks if mark <= last], np.int64)
    if len(marks) > count:
        marks = marks[_even(len(marks) - 1, count)]
    before = np.maximum(marks - 1, 0) if sides else marks
    return np.unique(np.concatenate([_even(last, count), before, marks]))


def _even(last: int, count: int) -> np.ndarray:
    return np.linspace(0, last, min(count, last + 1)).round().astype(np.int64)
