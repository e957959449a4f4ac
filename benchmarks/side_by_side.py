"""Measure several things side by side: taking turns in one run, so that the noise of the machine falls on all alike.

Not a benchmark but what the benchmarks share: turns, fresh processes and one way to print rows.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

T = TypeVar("T")
HOLDS, FAILS = "[green]holds[/green]", "[bold red]FAILS[/bold red]"


def in_turns(
    measurements: Mapping[str, Callable[[], T]], *, rounds: int, seconds: float = float("inf")
) -> dict[str, list[T]]:
    """Make each measurement once, then each once again, `rounds` times; no new round after `seconds`."""
    results: dict[str, list[T]] = {name: [] for name in measurements}
    start = time.perf_counter()
    for turn in range(rounds):
        if turn and time.perf_counter() - start > seconds:
            break
        for name, measure in measurements.items():
            results[name].append(measure())
    return results


def fresh(*arguments: str, limit: float = 120.0) -> dict[str, Any] | None:
    """Run this benchmark with `arguments` in a fresh process: what it says by `answer`, None past `limit` seconds."""
    without_cache = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    command = [sys.executable, sys.argv[0], *arguments]
    try:
        done = subprocess.run(command, env=without_cache, stdout=subprocess.PIPE, timeout=limit, check=True, text=True)
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout.splitlines()[-1])


def answer(**values: Any) -> None:
    """In a fresh process, hand these values to the one that asked for them."""
    print(json.dumps(values))


def compilations() -> list[tuple[str, float]]:
    """A list that grows by (program, seconds) each time XLA compiles something."""
    import jax

    seen: list[tuple[str, float]] = []

    def note(event: str, seconds: float, **details: Any) -> None:
        if event.endswith("backend_compile_duration"):
            seen.append((str(details.get("fun_name", "")), seconds))

    jax.monitoring.register_event_duration_secs_listener(note)
    return seen


def median(results: Iterable[dict[str, Any] | None], value: str) -> float:
    """The median of one value of several answers; infinite if any of them never came."""
    return statistics.median(float("inf") if result is None else result[value] for result in results)


def seconds(value: float, limit: float = 120.0) -> str:
    """A duration as it is printed."""
    return f"> {limit:.0f} s" if value == float("inf") else f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def verdict(claim: str, holds: bool) -> str:
    """A claim and whether it holds, as it is printed."""
    return f"{claim}: {HOLDS if holds else FAILS}"


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print one row a measurement; all columns but the first and the last are aligned to the right."""
    table = Table(title=f"{title} (Python {sys.version.split()[0]}, {_jax_version()})", title_justify="left")
    for place, name in enumerate(header):
        table.add_column(name, justify="right" if 0 < place < len(header) - 1 else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=115).print(table)


def _jax_version() -> str:
    from importlib.metadata import version

    return f"JAX {version('jax')}"
