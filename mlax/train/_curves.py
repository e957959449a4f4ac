"""Plots of the metrics of one or several runs. Also a script that imports nothing but Matplotlib:

python _curves.py curves.png runs/digits/metrics.jsonl [runs/other/metrics.jsonl ...]
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLORS = ("#0077BB", "#CC3311", "#009988", "#EE7733", "#33BBEE", "#EE3377", "#555555")  # safe for color blindness
NOT_PLOTTED = ("step", "seconds", "skipped", "evaluation", "event", "ids", "scale")
NOT_SMOOTHED = ("rate",)
MAX_POINTS = 2000  # per line


def plot_curves(path: Path, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Plot each metric over the steps: training as a line, evaluations as dots, in one color per run."""
    from matplotlib.figure import Figure

    names = _metric_names(runs)
    columns = min(len(names), 3) or 1
    rows = -(-len(names) // columns) or 1
    figure = Figure(figsize=(4.6 * columns, 3.4 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for name, axes in zip(names, panels, strict=False):
        for color, (run, records) in zip(COLORS * len(runs), runs.items(), strict=False):
            _plot_metric(axes, name, records, color, run if len(runs) > 1 else "")
        axes.set(title=name.replace("_", " "), xlabel="step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    temporary = path.with_suffix(".new.png")
    figure.savefig(temporary, dpi=130)
    temporary.replace(path)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, without an incomplete last line; none if there is no such file."""
    records: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _metric_names(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    names: dict[str, None] = {"loss": None}
    for records in runs.values():
        for record in records:
            names |= dict.fromkeys(name for name in (*record, *record.get("evaluation", ())) if name not in NOT_PLOTTED)
    return list(names)


def _plot_metric(axes: Any, name: str, records: Sequence[Mapping[str, Any]], color: str, run: str) -> None:
    training = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    scores = [(r["step"], r["evaluation"].get(name)) for r in records if "evaluation" in r]
    evaluations = [(step, value) for step, value in scores if value is not None]
    if training:
        points = training[:: max(1, len(training) // MAX_POINTS)]
        smooth = len(points) > 100 and name not in NOT_SMOOTHED
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=color, alpha=0.25 if smooth else 1, linewidth=1)
        axes.plot(steps, _smooth(values) if smooth else values, color=color, label=f"{run} training".strip())
        if name in ("loss", "gradient_norm") and min(values) > 0 and max(values) > 20 * min(values):
            axes.set_yscale("log")
    if evaluations:
        label = f"{run} evaluation".strip()
        axes.plot(*zip(*evaluations, strict=True), ".--", color=color if run else COLORS[1], label=label)


def _smooth(values: Sequence[float]) -> list[float]:
    """A bias-corrected exponential moving average over a fiftieth of the values."""
    keep = 1 - 50 / max(len(values), 51)
    mean, weight, averages = 0.0, 0.0, []
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        averages.append(mean / weight)
    return averages


if __name__ == "__main__":
    plot_curves(Path(sys.argv[1]), {Path(name).parent.name: read_records(Path(name)) for name in sys.argv[2:]})
