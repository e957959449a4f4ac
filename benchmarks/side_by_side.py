"""Measure several things side by side, taking turns in one run: the noise of the machine falls on all alike.

Not a benchmark but what the benchmarks share: turns, fresh processes, and one way to print rows.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

K, T = TypeVar("K"), TypeVar("T")
Answer = dict[str, Any]  # what a measurement in a fresh process found


def in_turns(
    measurements: Mapping[K, Callable[[], T]], *, rounds: int, seconds: float = float("inf")
) -> dict[K, list[T]]:
    """Make each measurement once, then each once again, `rounds` times; no new round begins after `seconds`.

    Each round has an order of its own, so that none of them always follows the same other.
    """
    results: dict[K, list[T]] = {name: [] for name in measurements}
    names, order = list(measurements), random.Random(0)
    start = time.perf_counter()
    for turn in range(rounds):
        if turn and time.perf_counter() - start > seconds:
            break
        order.shuffle(names)
        for name in names:
            results[name].append(measurements[name]())
    return results


def fresh(*arguments: str, limit: float = 120.0) -> Answer:
    """What this benchmark, run with `arguments` in a fresh process, hands to `answer`; {} past `limit` seconds."""
    uncached = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    command = [sys.executable, sys.argv[0], *arguments]
    try:
        done = subprocess.run(command, env=uncached, stdout=subprocess.PIPE, timeout=limit, check=True, text=True)
    except subprocess.TimeoutExpired:
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def answer(**values: Any) -> None:
    """In a fresh process: hand these values to the one that asked for them."""
    print(json.dumps(values))


class Process:
    """The same benchmark in another Python, which measures what each line asks for, and idles while others compute."""

    def __init__(self, python: str, *arguments: str):
        self.process = subprocess.Popen(
            [python, sys.argv[0], *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def ask(self, line: str) -> Any:
        assert self.process.stdin and self.process.stdout
        print(line, file=self.process.stdin)
        found = json.loads(self.process.stdout.readline())
        time.sleep(0.25)  # its threads look for more work for a while
        return found

    def end(self) -> None:
        self.process.communicate()


def serve(measure: Callable[[str], Any]) -> None:
    """In such a process: answer each line with what `measure` finds."""
    for line in sys.stdin:
        print(json.dumps(measure(line.strip())), flush=True)


def turn(step: Callable[[], Any], steps: int = 5) -> list[float]:
    """The seconds of each of some steps, after one that does not count."""
    step()
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return taken


def compilations() -> list[tuple[str, float]]:
    """A list that grows by (program, seconds) whenever XLA compiles something."""
    import jax

    seen: list[tuple[str, float]] = []

    def note(event: str, seconds: float, **details: Any) -> None:
        if event.endswith("backend_compile_duration"):
            seen.append((str(details.get("fun_name", "")), seconds))

    jax.monitoring.register_event_duration_secs_listener(note)
    return seen


def median(answers: Iterable[Answer], value: str) -> float:
    """The median of one value over several answers; one that never came counts as infinite."""
    return statistics.median(answer.get(value, float("inf")) for answer in answers)


def seconds(duration: float, limit: float = 120.0) -> str:
    """A duration as it is printed; an infinite one as more than `limit`."""
    if duration == float("inf"):
        return f"> {limit:.0f} s"
    for unit, size in ("s", 1.0), ("ms", 1e-3):
        if duration >= size:
            return f"{duration / size:.3g} {unit}"
    return f"{duration * 1e6:.0f} µs"


def verdict(claim: str, holds: bool) -> str:
    """A claim and whether it holds, as it is printed."""
    return f"{claim}: {'[green]holds[/green]' if holds else '[bold red]FAILS[/bold red]'}"


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print one row a measurement; numbers, which stand between the first and the last column, to the right."""
    from rich.console import Console  # not in the environments that only measure
    from rich.table import Table

    python = ".".join(map(str, sys.version_info[:2]))
    busy = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    table = Table(title=f"{title}\nPython {python}, JAX {version('jax')}, {busy}", title_justify="left")
    for place, name in enumerate(header):
        table.add_column(name, justify="right" if 0 < place < len(header) - 1 else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=115).print(table)
