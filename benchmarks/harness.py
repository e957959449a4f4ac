"""Run benchmarks side by side, interleaved in one run, so that the noise of the machine affects all of them.

Not a benchmark, but what the benchmarks share: interleaving, isolated processes, and one format for tables.
"""

import hashlib
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

K, T = TypeVar("K"), TypeVar("T")
Result = dict[str, Any]  # of a measurement in a new process


def interleave(
    measurements: Mapping[K, Callable[[], T]], *, rounds: int, seconds: float = float("inf")
) -> dict[K, list[T]]:
    """Run each measurement once per round, for `rounds` rounds; no new round starts after `seconds`.

    The order is shuffled in each round, so that no measurement always follows the same other one.
    """
    results: dict[K, list[T]] = {name: [] for name in measurements}
    names, order = list(measurements), random.Random(0)
    start = time.perf_counter()
    for round in range(rounds):
        if round and time.perf_counter() - start > seconds:
            break
        order.shuffle(names)
        for name in names:
            results[name].append(measurements[name]())
    return results


def run_isolated(*arguments: str, limit: float = 120.0) -> Result:
    """Run this benchmark with `arguments` in a new process; returns what it reports, or {} after `limit` seconds."""
    uncached = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    command = [sys.executable, sys.argv[0], *arguments]
    try:
        process = subprocess.run(command, env=uncached, stdout=subprocess.PIPE, timeout=limit, check=True, text=True)
    except subprocess.TimeoutExpired:
        return {}
    return json.loads(process.stdout.splitlines()[-1])


def report(**values: Any) -> None:
    """In such a process: return these values to the parent."""
    print(json.dumps(values))


class Process:
    """A process of this benchmark in another Python, which runs one measurement per line and idles in between."""

    def __init__(self, python: str, *arguments: str):
        self.process = subprocess.Popen(
            [python, sys.argv[0], *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def ask(self, line: str) -> Any:
        assert self.process.stdin and self.process.stdout
        print(line, file=self.process.stdin)
        result = json.loads(self.process.stdout.readline())
        time.sleep(0.25)  # its threads spin for a while
        return result

    def close(self) -> None:
        self.process.communicate()


def serve(measure: Callable[[str], Any]) -> None:
    """In such a process: answer each line with the result of `measure`."""
    for line in sys.stdin:
        print(json.dumps(measure(line.strip())), flush=True)


def time_steps(step: Callable[[], Any], steps: int = 5, least: float = 0.0) -> list[float]:
    """The seconds of each of `steps` calls, or of more until they take `least` seconds, after some to warm up.

    With `least`, a step below a millisecond is called often: its first calls after another library's turn are slower,
    since caches are cold and threads asleep.
    """
    begin = time.perf_counter()
    step()
    while time.perf_counter() - begin < least / 3:
        step()
    times: list[float] = []
    while len(times) < steps or sum(times) < least:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def record_compilations() -> list[tuple[str, float]]:
    """A list to which (program, seconds) is appended whenever XLA compiles."""
    import jax

    compiled: list[tuple[str, float]] = []

    def record(event: str, seconds: float, **details: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append((str(details.get("fun_name", "")), seconds))

    jax.monitoring.register_event_duration_secs_listener(record)
    return compiled


def median(results: Iterable[Result], value: str) -> float:
    """The median of one value over several results; a missing one counts as infinite."""
    return statistics.median(result.get(value, float("inf")) for result in results)


def seconds(duration: float, limit: float = 120.0) -> str:
    """A duration with its unit; an infinite one as more than `limit`."""
    if duration == float("inf"):
        return f"> {limit:.0f} s"
    for unit, size in ("s", 1.0), ("ms", 1e-3):
        if duration >= size:
            return f"{duration / size:.3g} {unit}"
    return f"{duration * 1e6:.0f} µs"


FAILED: list[str] = []  # claims of this process


def verdict(claim: str, holds: bool) -> str:
    """A claim and whether it holds."""
    if not holds:
        FAILED.append(claim)
    return f"{claim}: {'[green]holds[/green]' if holds else '[bold red]FAILS[/bold red]'}"


def program_hash(compiled: Any) -> str | None:
    """A hash of a compiled program but for names and source lines; None if its text leaves something out.

    XLA computes programs with the same hash in the same time, if their options are the same. How fast Python calls them
    is another matter: dispatch.py.
    """
    text = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text())
    computations = re.search(r"\n\n(?=%|ENTRY)", text)  # after the tables of files and functions
    if computations is None or "{...}" in text:  # a large constant
        return None
    header = text.partition("\n")[0].partition(", ")[2]  # layouts, and which arguments are donated
    text = header + text[computations.end() :]
    names: dict[str, str] = {}

    def rename(name: re.Match[str]) -> str:
        return names.setdefault(name[0].lstrip("%"), f"%{len(names)}")

    text = re.sub(r"%?[\w.-]+(?=: )|%[\w.-]+", rename, text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_rows(
    path: str | None,
    work: str,
    title: str,
    times: Mapping[str, float],
    torch_python: str | None = None,
    programs: Mapping[str, str | None] | None = None,
) -> None:
    """Append a row for the seconds of each library to a file of rows, if there is one; `programs` are their hashes."""
    if not path:
        return
    from benchmarks.suite.rows import about, append, ask_about

    for library, duration in times.items():
        if math.isnan(duration):  # it has no such layer
            continue
        name = library.replace("Flax", "Flax NNX")
        versions = ask_about(torch_python, name) if name == "PyTorch" and torch_python else about(name.split(",")[0])
        row = {"work": work, "title": title, "library": name, "metric": "time", "value": duration * 1e3, "unit": "ms"}
        row |= {"program": programs[library]} if library in (programs or {}) else {}
        append([{**row, **versions}], Path(path))


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print one row per measurement, with all columns but the first and last right-aligned."""
    from rich.console import Console  # missing in the environments of peers
    from rich.table import Table

    python = ".".join(map(str, sys.version_info[:2]))
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    table = Table(title=f"{title}\nPython {python}, JAX {version('jax')}, {load}", title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if 0 < i < len(header) - 1 else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=115).print(table)
