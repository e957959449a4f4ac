"""Tables and plots of schedules: as text, and as image files."""

import os
from typing import Any

import numpy as np

from mlax.optim.schedules._checks import LAST_STEP, is_step_count

DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # bits of a braille character, by column, from below


def format_table(schedule: Any, steps: int | None, rows: int) -> str:
    """A table of two columns, steps and values."""
    if not is_step_count(rows, 2):
        raise ValueError(f"{schedule}: rows is {rows!r}, but must be an integer of at least 2; pass an int.")
    shown = _sample_steps(schedule, steps, rows)
    values = schedule.values(shown)
    cells = [("step", "value"), *((f"{step:_}", f"{value:.6g}") for step, value in zip(shown, values, strict=True))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(f"{step:>{widths[0]}}  {value:>{widths[1]}}" for step, value in cells)


def plot_text(schedule: Any, steps: int | None, width: int, height: int) -> str:
    """A plot in braille dots, two by four in each character, with the ends of both axes labelled."""
    if not (is_step_count(width, 2) and is_step_count(height, 2)):
        raise ValueError(
            f"{schedule}: width and height are {width!r} and {height!r}, but must be integers of at least 2; pass ints."
        )
    shown = _sample_steps(schedule, steps, 2 * width, both_sides=True)
    values = schedule.values(shown).astype(np.float64)
    low, high = values.min(), values.max()
    positions = shown / shown[-1] * (2 * width - 1)
    columns = np.union1d(positions, np.arange(2 * width))  # a dot in every column, even with fewer steps than columns
    heights = np.interp(columns, positions, (values - low) / ((high - low) or 1.0) * (4 * height - 1))
    cells = _draw_line(columns.round().astype(int), heights.round().astype(int), width, height)

    labels = {height - 1: f"{low:.6g}"} if high == low else {0: f"{high:.6g}", height - 1: f"{low:.6g}"}
    margin = max(map(len, labels.values()))
    lines = [
        f"{labels.get(row, ''):>{margin}} │" + "".join(chr(0x2800 + dots) for dots in cells[row])
        for row in range(height)
    ]
    return "\n".join([*lines, " " * margin + " └" + "─" * width, f"{'':{margin}}  0{f'{shown[-1]:_}':>{width - 1}}"])


def _draw_line(columns: np.ndarray, heights: np.ndarray, width: int, height: int) -> np.ndarray:
    """The braille bits of each character, top row first, of a line without vertical gaps."""
    cells = np.zeros((height, width), int)
    for index, (column, here) in enumerate(zip(columns, heights, strict=True)):
        before = heights[max(0, index - 1)]
        for dot in range(min(before, here), max(before, here) + 1):
            cells[height - 1 - dot // 4, column // 2] |= DOTS[column % 2][dot % 4]
    return cells


def plot(schedule: Any, path: str | os.PathLike[str], steps: int | None) -> None:
    """Write a plot to an image file, with the schedule as its title."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "schedule.plot needs matplotlib, which is not installed; pip install mlax[demo], or print "
            "schedule.plot_text()."
        ) from error
    shown = _sample_steps(schedule, steps, 1000, both_sides=True)
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(shown, schedule.values(shown))
    axes.set(xlabel="step", ylabel="value", xlim=(0, shown[-1]))
    axes.set_title(repr(schedule), fontsize="medium", wrap=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def _sample_steps(schedule: Any, steps: int | None, count: int, *, both_sides: bool = False) -> np.ndarray:
    """About `count` evenly spaced steps from 0 to `steps`, and at most `count` breakpoints.

    `steps=None` is the length. With `both_sides`, also the step before each breakpoint.
    """
    if steps is None and schedule.length is None:
        raise ValueError(f"{schedule}: it has no last step; pass steps=, how many of them to show.")
    last = max(1, schedule.length) if steps is None else steps
    if not is_step_count(last, 1):
        raise ValueError(f"{schedule}: steps is {steps!r}, but must be an integer from 1 to {LAST_STEP}; pass an int.")
    breakpoints = np.asarray([step for step in schedule.breakpoints if step <= last], np.int64)
    if len(breakpoints) > count:
        breakpoints = breakpoints[_evenly_spaced(len(breakpoints) - 1, count)]
    before = np.maximum(breakpoints - 1, 0) if both_sides else breakpoints
    return np.unique(np.concatenate([_evenly_spaced(last, count), before, breakpoints]))


def _evenly_spaced(last: int, count: int) -> np.ndarray:
    return np.linspace(0, last, min(count, last + 1)).round().astype(np.int64)
