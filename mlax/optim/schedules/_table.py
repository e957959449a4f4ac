"""table: a schedule as two columns of text."""

from typing import Any

from mlax.optim.schedules._checks import is_whole
from mlax.optim.schedules._samples import samples


def table(schedule: Any, steps: int | None, rows: int) -> str:
    """Steps on the left and values on the right, under a line of headings."""
    if not is_whole(rows, 2):
        raise ValueError(f"{schedule}: rows is {rows!r}, but must be a whole number of at least 2; pass an int.")
    shown = samples(schedule, steps, rows)
    values = schedule.values(shown)
    cells = [("step", "value"), *((f"{step:_}", f"{value:.6g}") for step, value in zip(shown, values, strict=True))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(f"{step:>{widths[0]}}  {value:>{widths[1]}}" for step, value in cells)
