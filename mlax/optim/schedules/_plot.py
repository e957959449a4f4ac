"""Schedules as tables, text plots and image files."""

import os
from typing import Any

import numpy as np

from mlax.optim.schedules._checks import LAST_STEP, is_step_count


def sample_steps(schedule: Any, steps: int | None, count: int, *, sides: bool = False) -> np.ndarray:
    """About `count` even steps from 0 to `steps` and the marks among them, with their left sides if wanted.

    Where `steps` is None it is the length. Of more than `count` marks only `count` are taken.
    """
    if steps is None and schedule.length is None:
        raise ValueError(f"{schedule}: it goes on for ever; pass steps=, how many of them to show.")
    last = max(1, schedule.length) if steps is None else steps
    if not is_step_count(last, 1):
        raise ValueError(f"{schedule}: steps is {steps!r}, but must be an integer from 1 to {LAST_STEP}; pass an int.")
    marks = np.asarray([mark for mark in schedule.marks if mark <= last], np.int64)
    if len(marks) > count:
        marks = marks[_evenly_spaced(len(marks) - 1, count)]
    before = np.maximum(marks - 1, 0) if sides else marks
    return np.unique(np.concatenate([_evenly_spaced(last, count), before, marks]))


def _evenly_spaced(last: int, count: int) -> np.ndarray:
    return np.linspace(0, last, min(count, last + 1)).round().astype(np.int64)


def format_table(schedule: Any, steps: int | None, rows: int) -> str:
    """Steps on the left and values on the right, under a line of headings."""
    if not is_step_count(rows, 2):
        raise ValueError(f"{schedule}: rows is {rows!r}, but must be an integer of at least 2; pass an int.")
    shown = sample_steps(schedule, steps, rows)
    values = schedule.values(shown)
    cells = [("step", "value"), *((f"{step:_}", f"{value:.6g}") for step, value in zip(shown, values, strict=True))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(f"{step:>{widths[0]}}  {value:>{widths[1]}}" for step, value in cells)


DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # of a braille character, by column and from below


def plot_text(schedule: Any, steps: int | None, width: int, height: int) -> str:
    """The curve in braille dots, two by four in each character, its axes labelled at their ends."""
    if not (is_step_count(width, 2) and is_step_count(height, 2)):
        raise ValueError(
            f"{schedule}: width and height are {width!r} and {height!r}, but must be integers of at least 2; pass ints."
        )
    shown = sample_steps(schedule, steps, 2 * width, sides=True)
    values = schedule.values(shown).astype(np.float64)
    low, high = values.min(), values.max()
    places = shown / shown[-1] * (2 * width - 1)
    columns = np.union1d(places, np.arange(2 * width))  # each has a dot, where there are fewer steps than columns too
    heights = np.interp(columns, places, (values - low) / ((high - low) or 1.0) * (4 * height - 1))
    columns, heights = columns.round().astype(int), heights.round().astype(int)

    cells = np.zeros((height, width), int)  # the top row first
    for index, (column, here) in enumerate(zip(columns, heights, strict=True)):
        before = heights[max(0, index - 1)]
        for dot in range(min(before, here), max(before, here) + 1):  # no gap to the dot before it
            cells[height - 1 - dot // 4, column // 2] |= DOTS[column % 2][dot % 4]

    labels = {height - 1: f"{low:.6g}"} if high == low else {0: f"{high:.6g}", height - 1: f"{low:.6g}"}
    margin = max(map(len, labels.values()))
    lines = [
        f"{labels.get(row, ''):>{margin}} │" + "".join(chr(0x2800 + dots) for dots in cells[row])
        for row in range(height)
    ]
    return "\n".join([*lines, " " * margin + " └" + "─" * width, f"{'':{margin}}  0{f'{shown[-1]:_}':>{width - 1}}"])


def plot(schedule: Any, path: str | os.PathLike[str], steps: int | None) -> None:
    """Write the curve to a file, with its axes named and the schedule as its title."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "schedule.draw needs matplotlib, which is not installed; pip install mlax[demo], or print schedule.curve()."
        ) from error
    shown = sample_steps(schedule, steps, 1000, sides=True)
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(shown, schedule.values(shown))
    axes.set(xlabel="step", ylabel="value", xlim=(0, shown[-1]))
    axes.set_title(repr(schedule), fontsize="medium", wrap=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
