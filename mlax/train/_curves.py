"""Plots of the metrics of one or several runs. Also a script that imports nothing but Matplotlib:

python _curves.py curves.png runs/digits/metrics.jsonl [runs/other/metrics.jsonl ...]
"""

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

COLORS = ("#0077BB", "#CC3311", "#009988", "#EE7733", "#33BBEE", "#EE3377", "#555555")  # safe for color blindness
NOT_PLOTTED = ("step", "seconds", "skipped", "evaluation", "event", "ids", "scale")
LINES = (".--", "x:", "+-.", "d--")  # of the feeds of an evaluation, where the colors are those of the runs
MAX_POINTS = 2000  # per line
MAX_LINE_BYTES = 1 << 20  # of a log


def plot_curves(path: Path, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Plot each metric over the steps: training as a line, evaluations as dots, in one color per run.

    The scores "valid/loss" and "test/loss" are shown beside the loss of training.
    """
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


def read_records(
    path: Path, *, most: int | None = None, report: Callable[[str], object] | None = None
) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, without damaged lines and an incomplete last one; none if there is no such file.

    With `most`, about `most` of its steps at equal distances and the last one, so that a long log is read fast.
    `report` is called with a message if lines are damaged.
    """
    stride = 1 if most is None else max(1, _estimate_lines(path) // most)
    records: list[dict[str, Any] | None] = []
    line, left_out = b"", False
    for at, line in enumerate(read_lines(path)):
        left_out = bool(at % stride) and b'"evaluation"' not in line and b'"event"' not in line
        if not left_out:
            records.append(parse_record(line))
    if left_out:
        records.append(parse_record(line))
    if records and not line.endswith(b"\n") and records[-1] is None:
        records.pop()  # incomplete, since it is being written or its writer was killed
    found = [record for record in records if record is not None]
    if report is not None and len(found) < len(records):
        report(f"{path}: {len(records) - len(found)} damaged lines are left out")
    return found


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, one after the other; none if there is no such file."""
    if path.exists():
        with path.open("rb") as file:
            yield from iter(lambda: file.readline(MAX_LINE_BYTES), b"")


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The record in a line of a log; None if the line is incomplete or damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    scores = record.get("evaluation", {})
    return record if isinstance(scores, dict) and all(map(_is_number_or_null, scores.values())) else None


def _is_number_or_null(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _estimate_lines(path: Path) -> int:
    """About how many lines a file has, by its size and its first lines."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        beginning = file.read(1 << 16)
    return path.stat().st_size * beginning.count(b"\n") // max(len(beginning), 1)


def _metric_names(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    names: dict[str, None] = {"loss": None}
    for records in runs.values():
        trained = {name for record in records for name in record}
        for record in records:
            scores = record.get("evaluation", {})
            found = [name for name in record if name not in NOT_PLOTTED and _is_number(record[name])]
            found += [_split_score(name, trained)[1] for name in scores if _is_number(scores[name])]
            names |= dict.fromkeys(name for name in found if name not in NOT_PLOTTED)
    return list(names)


def _split_score(name: str, trained: Collection[str]) -> tuple[str, str]:
    """The feed and the metric of a score: "valid/loss" is the loss of valid, unless training has a metric of that name.

    The only feed of a run has no name.
    """
    feed, slash, metric = name.partition("/")
    return (feed, metric) if slash and name not in trained else ("", name)


def _plot_metric(axes: Any, name: str, records: Sequence[Mapping[str, Any]], color: str, run: str) -> None:
    training = [(r["step"], r[name]) for r in records if _is_number(r.get(name))]
    if training:
        points = training[:: max(1, len(training) // MAX_POINTS)]
        smooth = len(points) > 100 and name.partition("/")[0] != "rate"
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=color, alpha=0.25 if smooth else 1, linewidth=1)
        axes.plot(steps, smooth_values(values) if smooth else values, color=color, label=f"{run} training".strip())
        if name in ("loss", "gradient_norm") and min(values) > 0 and max(values) > 20 * min(values):
            axes.set_yscale("log")
    for at, (feed, points) in enumerate(_evaluations(name, records).items()):
        label = f"{run} {feed or 'evaluation'}".strip()
        style = LINES[at % len(LINES)] if run else LINES[0]
        others = COLORS[1:]
        axes.plot(*zip(*points, strict=True), style, color=color if run else others[at % len(others)], label=label)


def _evaluations(name: str, records: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The scores of a metric by feed: steps and values."""
    trained = {key for record in records for key in record}
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for score, value in record.get("evaluation", {}).items():
            feed, metric = _split_score(score, trained)
            if metric == name and _is_number(value):
                found.setdefault(feed, []).append((record["step"], value))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def smooth_values(values: Sequence[float]) -> list[float]:
    """A centred moving average over a fiftieth of the values, which does not lag behind.

    It is taken of fewer values at the start, and ends with the line of least squares through the last of them.
    """
    half = len(values) // 100
    averages: list[float] = []
    for at in range(len(values) - half):
        reach = min(half, at)
        averages.append(sum(values[at - reach : at + reach + 1]) / (2 * reach + 1))
    offsets = range(-half, half + 1)
    moment = sum(offset * value for offset, value in zip(offsets, values[-len(offsets) :], strict=False))
    slope = moment / max(sum(offset**2 for offset in offsets), 1)
    return averages + [averages[-1] + slope * offset for offset in range(1, half + 1)]


if __name__ == "__main__":
    found = {Path(name).parent.name: read_records(Path(name), most=2 * MAX_POINTS) for name in sys.argv[2:]}
    plot_curves(Path(sys.argv[1]), found)
