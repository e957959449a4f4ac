"""Tables of rows, in Markdown, between the markers of README.md and of docs/benchmarks.md."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.suite.claims import judge, judge_cpu, judge_scaling
from benchmarks.suite.rows import Row
from benchmarks.suite.works import WORKS

MARKERS = "<!-- benchmarks -->", "<!-- end of benchmarks -->"


def write_tables(path: Path, text: str) -> None:
    """Replace what is between the markers of a page."""
    page, (start, end) = path.read_text(), MARKERS
    if page.count(start) != 1 or page.count(end) != 1:
        raise ValueError(f"{path} must have one {start} and one {end} after it.")
    before, _, rest = page.partition(start)
    between = f"\n{text}\n\n" if text else ""
    path.write_text(f"{before}{start}\n{between}{end}{rest.partition(end)[2]}")


def readme_tables(gpu: Sequence[Row], cpu: Sequence[Row]) -> str:
    """Models, on a GPU and on a CPU, and the claims that fail."""
    steps = [row for row in cpu if row["work"] == "train"]
    return "\n\n".join(filter(None, (table(_without(gpu, "scaling")), failing(gpu), table(steps))))


def page_tables(gpu: Sequence[Row], cpu: Sequence[Row]) -> str:
    """All of it."""
    parts = []
    for title, rows in {"GPU": gpu, "CPU": cpu}.items():
        if rows:
            parts += [f"## {title}", table(_without(rows, "scaling")), failing(rows), scaling(rows)]
    return "\n\n".join(filter(None, parts))


def _without(rows: Sequence[Row], work: str) -> list[Row]:
    return [row for row in rows if row["work"] != work]


def table(rows: Sequence[Row]) -> str:
    """A line for each work, and a column for each library, whose variants share it."""
    if not rows:
        return ""
    libraries = list(dict.fromkeys(_library(row) for row in rows))
    lines = [["work", *libraries], ["---"] * (len(libraries) + 1)]
    key: Callable[[Row], str] = lambda row: row["title"]  # noqa: E731
    for title, group in itertools.groupby(sorted(rows, key=_order(rows, key)), key):
        cells = list(group)
        lines.append([title, *(_cell([row for row in cells if _library(row) == each]) for each in libraries)])
    return _describe(rows) + "\n\n" + _draw(lines)


def _order(rows: Sequence[Row], key: Callable[[Row], str]) -> Callable[[Row], int]:
    """The place of a row's title among those of the set, then of the rows."""
    places = {title: i for i, title in enumerate(dict.fromkeys([*(w.title for w in WORKS), *map(key, rows)]))}
    return lambda row: places[key(row)]


def failing(rows: Sequence[Row]) -> str:
    """How many claims hold, and which fail."""
    measured = {row["work"] for row in rows}
    verdicts = [judge(work, claim, rows) for work in WORKS if work.name in measured for claim in work.claims]
    verdicts += [*judge_cpu(rows), *judge_scaling(rows)]
    failed = [words for words, holds in verdicts if not holds]
    if not verdicts:
        return ""
    head = f"{len(verdicts) - len(failed)} of {len(verdicts)} claims hold"
    return f"{head}; these fail:\n\n" + "\n".join(f"- {words}" for words in failed) if failed else f"{head}."


def scaling(rows: Sequence[Row]) -> str:
    """The fitted exponents beside those of theory, which are upper bounds."""
    rows = [row for row in rows if row["work"] == "scaling"]
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    lines = [["grows with", *(f"{metric}, fitted (theory)" for metric in metrics)], ["---"] * (len(metrics) + 1)]
    for axis in dict.fromkeys(row["title"] for row in rows):
        found = {row["metric"]: f"{row['value']:.2f} ({row['theory']:g})" for row in rows if row["title"] == axis}
        lines.append([axis, *(found.get(metric, "") for metric in metrics)])
    return f"### Exponents\n\n{_describe(rows)}\n\n{_draw(lines)}" if rows else ""


def _library(row: Row) -> str:
    return row["library"].split(",")[0]


def _cell(rows: Sequence[Row]) -> str:
    cells = []
    for name in dict.fromkeys(row["library"] for row in rows):
        values = ", ".join(f"{_round(row['value'])} {row['unit']}" for row in rows if row["library"] == name)
        variant = name.partition(", ")[2]
        cells.append(f"{variant}: {values}" if variant else values)
    return "; ".join(cells)


def _round(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def _describe(rows: Sequence[Row]) -> str:
    """The devices, dates and versions of rows."""
    versions = {name: each for row in rows for name, each in row["versions"].items()}
    dates = sorted(row["date"] for row in rows)
    devices = ", ".join(sorted({row["device"] for row in rows}))
    packages = ", ".join(f"{name} {each}" for name, each in versions.items())
    return f"{devices}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; {packages}."


def _draw(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
