"""curve: a schedule as a line of dots, for a terminal."""

from typing import Any

import numpy as np

from mlax.optim.schedules._checks import is_whole
from mlax.optim.schedules._samples import samples

DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # of a braille character, by column and from below


def curve(schedule: Any, steps: int | None, width: int, height: int) -> str:
    """The curve in braille dots, two by four in each character, its axes labelled at their ends."""
    if not (is_whole(width, 2) and is_whole(height, 2)):
        raise ValueError(
            f"{schedule}: width and height are {width!r} and {height!r}, but must be whole numbers of at least 2; "
            "pass ints."
        )
    shown = samples(schedule, steps, 2 * width, sides=True)
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
