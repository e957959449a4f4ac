"""`mlax plot`: several runs in one table and one picture."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run(runs: Sequence[str], output: str) -> int:
    """Print the last and best scores of each run; draw the curves of all."""
    from mlax import train
    from mlax.train import read_records

    found = {folder: read_records(Path(folder) / "metrics.jsonl") for folder in map(_plain, runs)}
    empty = [folder for folder, records in found.items() if not records]
    if empty:
        print(f"left out, since there is no metrics.jsonl with records: {', '.join(empty)}")
    found = {folder: records for folder, records in found.items() if records}
    if not found:
        raise SystemExit("mlax plot: none of these is the folder of a run.")
    print(table(found))
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("mlax plot: the picture needs Matplotlib: pip install matplotlib.")
    train.draw_curves(Path(output), found)
    print(f"drawn: {output}")
    return 0


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each run: its last step, and the last and best of each score; losses are best when low."""
    scores = {run: [r["evaluation"] for r in records if "evaluation" in r] for run, records in runs.items()}
    names = list(dict.fromkeys(name for each in scores.values() for score in each for name in score)) or ["loss"]
    heads = ["run", "step", *(f"{name} ({which})" for name in names for which in ("last", "best"))]
    rows = [heads]
    for run, records in runs.items():
        source = scores[run] or records  # a run without evaluations is compared by its training
        values = {name: [r[name] for r in source if r.get(name) is not None] for name in names}
        cells = [cell for name in names for cell in _last_and_best(name, values[name])]
        rows.append([run, f"{records[-1]['step']:,}", *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _last_and_best(name: str, values: list[float]) -> tuple[str, str]:
    if not values:
        return "", ""
    low = any(word in name for word in ("loss", "error", "perplexity"))
    return f"{values[-1]:.4g}", f"{(min if low else max)(values):.4g}"


def _plain(folder: str) -> str:
    return folder.rstrip("/").removesuffix("/metrics.jsonl")
