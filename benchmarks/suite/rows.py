"""Rows: one for each measurement, as JSON, the claims about them, and the tables of README.md and of the page."""

import datetime
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.suite.works import EQUINOX, FLAX, JAX, MLAX, PEERS, TORCH, Claim, Work

Row = dict[str, Any]
PACKAGES = {
    MLAX: ("mlax", "jax"),
    JAX: ("jax", "optax"),
    FLAX: ("flax", "jax", "optax"),
    EQUINOX: ("equinox", "jax", "optax"),
    TORCH: ("torch", "torchvision", "transformers"),
}


def to_rows(work: Work, entry: str, first: float, report: Row) -> list[Row]:
    """The rows of one entry: a time or a rate, and the memory where the device tells."""
    described = {"work": work.name, "title": work.title, "library": entry}
    rows = [{"metric": "time", "value": first, "unit": "s"} if work.alone else _speed(work, report["times"])]
    if report["memory"] and not work.alone:
        rows.append({"metric": "memory", "value": report["memory"] / 2**30, "unit": "GiB"})
    return [{**described, **row, **report["about"]} for row in rows]


def about(library: str) -> Row:
    """The date, the device, and the versions of the packages that decide the speed of a library."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": _device(library),
        "versions": {name: found for name in PACKAGES[library] if (found := _version(name))},
    }


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

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    import jax

    return jax.devices()[0].device_kind


def _speed(work: Work, times: Sequence[float]) -> Row:
    """The median of the repetitions, and their range."""
    if work.program == "decode":
        values, metric, unit = [work.size.batch * work.size.tokens / each for each in times], "rate", "tokens/s"
    else:
        values, metric, unit = [each * 1e3 / getattr(work.size, "steps", 1) for each in times], "time", "ms"
    return {"metric": metric, "value": statistics.median(values), "unit": unit, "range": [min(values), max(values)]}


def append(rows: Iterable[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def differing(work: Work, values: dict[str, Any]) -> list[str]:
    """The entries whose losses or tokens are not mlax's."""
    own = values.get(MLAX)
    return [
        f"{entry}: {_short(each)}, mlax: {_short(own)}" for entry, each in values.items() if not _same(work, own, each)
    ]


def _same(work: Work, own: Any, other: Any) -> bool:
    if own is None or work.alone:
        return True
    if work.program == "decode":  # in bfloat16 near ties go either way, and all that follows with them
        return own == other or work.tolerance > 1e-3
    return all(abs(a - b) <= work.tolerance * abs(own[0]) for a, b in zip(own, other, strict=True))


def _short(values: Any) -> str:
    return (
        "none" if values is None else ", ".join(f"{each:.4f}" if isinstance(each, float) else "..." for each in values)
    )


def judge(work: Work, claim: Claim, rows: Iterable[Row]) -> tuple[str, bool]:
    """A claim in words, with what was measured, and whether it holds."""
    values = {row["library"]: row for row in rows if row["work"] == work.name and row["metric"] == claim.metric}
    own = values.get(claim.entry)
    relation, is_rate = ("at least" if claim.metric == "rate" else "at most"), claim.metric == "rate"
    if own is None:
        return f"{work.title}: {claim.entry} was not measured", False
    unit, value = own["unit"], own["value"]
    if claim.of is None:
        bound, words = claim.bound, f"{relation} {claim.bound:,g} {unit}"
    else:
        others = {name: row["value"] for name, row in values.items() if _is_meant(claim, name)}
        if not others:
            return f"{work.title}: {claim.entry} has nothing to be compared with", False
        best = (max if is_rate else min)(others, key=others.__getitem__)
        bound = claim.bound * others[best]
        words = f"{relation} {claim.bound:g} x {best}, {others[best]:,.4g} {unit}"
    holds = value >= bound if is_rate else value <= bound
    return f"{work.title}: {claim.entry} {value:,.4g} {unit}, {words}", holds


def _is_meant(claim: Claim, name: str) -> bool:
    return not name.startswith(MLAX) if claim.of == PEERS else name == claim.of


def markdown(rows: Sequence[Row]) -> str:
    """A table with a line for each work, and a column for each library, variants included."""
    columns = list(dict.fromkeys(row["library"].split(",")[0] for row in rows))
    header = ["work", *columns]
    lines = [header, ["---"] * len(header)]
    for _, group in itertools.groupby(rows, key=lambda row: row["work"]):
        group = list(group)
        lines.append([group[0]["title"], *(_cell(group, column) for column in columns)])
    return "\n".join([_describe(rows), "", *(f"| {' | '.join(line)} |" for line in lines)])


def _cell(rows: list[Row], column: str) -> str:
    own = [row for row in rows if row["library"].split(",")[0] == column]
    names = dict.fromkeys(row["library"] for row in own)
    parts = []
    for name in names:
        values = ", ".join(f"{_rounded(row['value'])} {row['unit']}" for row in own if row["library"] == name)
        variant = name.partition(", ")[2]
        parts.append(f"{variant}: {values}" if variant else values)
    return "; ".join(parts)


def _rounded(value: float) -> str:
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value))) if value < 100 else 0}f}"


def _describe(rows: Sequence[Row]) -> str:
    versions: dict[str, str] = {}
    for row in rows:
        versions |= row["versions"]
    dates = sorted({row["date"] for row in rows})
    names = ", ".join(f"{name} {number}" for name, number in versions.items())
    devices = ", ".join(sorted({row["device"] for row in rows}))
    return f"{devices}; {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}; {names}."
