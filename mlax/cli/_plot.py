"""`mlax plot`: the last and best scores of runs in a table, and their curves."""

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Records = list[dict[str, Any]]

# Words in the name of a metric that say which values are good. Of other metrics nothing is called the best.
LOWER = "loss error err perplexity ppl bits nats bpb bpc bpd nll mse rmse mae wer cer fid kl distance regret"
HIGHER = "accuracy acc precision recall f1 auc auroc ap map bleu rouge meteor psnr ssim iou dice reward"
MAX_STEPS = 10_000  # that are read of a run with evaluations: the curves show fewer


def plot(runs: Sequence[str], output: str) -> int:
    """Print the last and best scores of each run, and plot the curves of all."""
    from mlax.train import plot_curves

    found = {folder: _read_run(Path(folder)) for folder in _expand(runs)}
    empty = [folder for folder, records in found.items() if not records]
    if empty:
        print(f"left out, as they have no metrics.jsonl with records: {', '.join(empty)}")
    found = {folder: records for folder, records in found.items() if records}
    if not found:
        raise SystemExit("mlax plot: none of these is the folder of a run.")
    print(score_table(found, recorded_directions(found)))
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("mlax plot: the curves need Matplotlib: pip install matplotlib.")
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    plot_curves(Path(output), found)
    print(f"curves: {output}")
    return 0


def _expand(folders: Sequence[str]) -> list[str]:
    """The folders of runs, with the runs inside in place of a folder of several."""
    found: list[str] = []
    for folder in map(_strip_file_name, folders):
        inside = [] if (Path(folder) / "metrics.jsonl").exists() else sorted(Path(folder).glob("*/metrics.jsonl"))
        found.extend([str(file.parent) for file in inside] or [folder])
    return found


def _read_run(folder: Path) -> Records:
    from mlax.train import read_records

    records = read_records(folder / "metrics.jsonl", most=MAX_STEPS, report=print)
    if any("evaluation" in record for record in records):
        return records
    return read_records(folder / "metrics.jsonl")  # the training metrics are compared, so that each of them counts


def recorded_directions(folders: Sequence[str] | dict[str, Any]) -> dict[str, str]:
    """Whether the best value of a metric is its "min" or its "max", by the `best` of each run, if they agree."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        try:
            best = json.loads((Path(folder) / "config.json").read_text())["best"]
            kind, metric = re.fullmatch(r"(Minimize|Maximize)\((?:metric=)?'(.*)'\)", best).groups()  # pyright: ignore[reportOptionalMemberAccess]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        found.setdefault(metric, set()).add("min" if kind == "Minimize" else "max")
    return {metric: kinds.pop() for metric, kinds in found.items() if len(kinds) == 1}


def direction(name: str) -> str | None:
    """Whether the best value of a metric is its "min" or its "max", by the words of its name; None if unknown."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    is_lower, is_higher = (not words.isdisjoint(known.split()) for known in (LOWER, HIGHER))
    return None if is_lower == is_higher else "min" if is_lower else "max"


def score_table(runs: dict[str, Records], directions: dict[str, str]) -> str:
    """A row for each run: its last step, and of each score the last value and the best, or the range if unknown."""
    scores = {run: [r["evaluation"] for r in records if "evaluation" in r] for run, records in runs.items()}
    names = list(dict.fromkeys(name for each in scores.values() for score in each for name in score)) or ["loss"]
    columns = {name: _columns(directions.get(name) or direction(name)) for name in names}
    rows = [["run", "step", *(f"{name} ({title})" for name in names for title in columns[name])]]
    for run, records in runs.items():
        source = scores[run] or records  # a run without evaluations is compared by its training metrics
        cells = [_cell(source, name, kind) for name in names for kind in columns[name].values()]
        rows.append([run, f"{records[-1]['step']:,}", *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _columns(best: str | None) -> dict[str, str]:
    """The columns of a metric: their titles, and what they show."""
    return {"last": "last", "best": best} if best else {"last": "last", "min": "min", "max": "max"}


def _cell(records: Sequence[dict[str, Any]], name: str, kind: str) -> str:
    values = [value for record in records if isinstance(value := record.get(name), int | float)]
    if not values:
        return ""
    return f"{values[-1] if kind == 'last' else min(values) if kind == 'min' else max(values):.4g}"


def _strip_file_name(folder: str) -> str:
    return folder.rstrip("/").removesuffix("/metrics.jsonl")
