"""Rows: one for each measurement, as JSON, with the date, the device and the versions that it was made with."""

import datetime
import functools
import json
import os
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.suite.works import EQUINOX, FLAX, JAX, MLAX, TORCH, Work

Row = dict[str, Any]
ROOT = Path(__file__).parents[2]
PACKAGES = {
    MLAX: ("mlax", "jax"),
    JAX: ("jax", "optax"),
    FLAX: ("flax", "jax", "optax"),
    EQUINOX: ("equinox", "jax", "optax"),
    TORCH: ("torch", "torchvision", "transformers"),
}


def to_rows(work: Work, entry: str, first: float, report: Row) -> list[Row]:
    """The rows of one entry: a time or a rate, with what it computed, and the memory where the device reports it."""
    described = {"work": work.name, "title": work.title, "library": entry}
    speed = {"metric": "time", "value": first, "unit": "s"} if work.alone else _speed(work, report["times"])
    rows = [{**speed, "computed": report["values"]}]
    if report["memory"] and not work.alone:
        rows.append({"metric": "memory", "value": report["memory"] / 2**30, "unit": "GiB"})
    return [{**described, **row, **report["about"]} for row in rows]


def _speed(work: Work, times: Sequence[float]) -> Row:
    """The median of the repetitions, and their range."""
    if work.program == "decode":
        values, metric, unit = [work.size.batch * work.size.tokens / each for each in times], "rate", "tokens/s"
    else:
        values, metric, unit = [each * 1e3 / getattr(work.size, "steps", 1) for each in times], "time", "ms"
    return {"metric": metric, "value": statistics.median(values), "unit": unit, "range": [min(values), max(values)]}


def about(library: str) -> Row:
    """The date, the device, and the versions of the packages that decide the speed of a library."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": _device(library),
        "versions": {name: found for name in PACKAGES[library] if (found := _version(name))},
    }


@functools.cache
def ask_about(python: str, library: str) -> Row:
    """`about` in another Python."""
    code = f"import json; from benchmarks.suite.rows import about; print(json.dumps(about({library!r})))"
    answer = subprocess.run([python, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


def _version(name: str) -> str | None:
    if name == "mlax":
        import mlax

        return mlax.__version__
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device(library: str) -> str:
    if library == TORCH:
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu()
    import jax

    return _cpu() if jax.default_backend() == "cpu" else jax.devices()[0].device_kind


def _cpu() -> str:
    """The number of cores that this process may use, and their kind where Linux tells."""
    cores, info = len(os.sched_getaffinity(0)), Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{cores} cores, {names[0]}" if names else f"{cores} cores"


def append(rows: Iterable[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def merge(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Rows with new measurements in place of old ones of the same."""
    return list({(row["work"], row["title"], row["library"], row["metric"]): row for row in (*old, *new)}.values())
