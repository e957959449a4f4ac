"""draw: a schedule as a picture."""

import os
from typing import Any

from mlax.optim.schedules._samples import samples


def draw(schedule: Any, path: str | os.PathLike[str], steps: int | None) -> None:
    """Write the curve to a file, with its axes named and the schedule as its title."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "schedule.draw needs matplotlib, which is not installed; pip install mlax[demo], or print schedule.curve()."
        ) from error
    shown = samples(schedule, steps, 1000, sides=True)
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(shown, schedule.values(shown))
    axes.set(xlabel="step", ylabel="value", xlim=(0, shown[-1]))
    axes.set_title(repr(schedule), fontsize="medium", wrap=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
