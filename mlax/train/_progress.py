"""Progress: how training goes, on one live line in a terminal and on a line now and then elsewhere."""

import collections
import sys
import time
from collections.abc import Mapping
from typing import Any, Self

from mlax.inspect import gib

QUIET = ("skipped", "gradient_norm", "scale", "step", "seconds")  # not worth room on a line


class Progress:
    """A bar with the step, speed, metrics and time left."""

    def __init__(self, start: int, steps: int, *, show: bool = True, every: float = 20.0):
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.start, self.steps, self.every = start, steps, every
        self.terminal = show and sys.stdout.isatty()
        self.plain = show and not self.terminal
        self.tested = ""  # the last evaluation in words
        self._done: collections.deque[tuple[float, int]] = collections.deque(maxlen=40)  # when which step was done
        self._said_at, self._tenth = time.monotonic(), 10 * start // max(steps, 1)
        columns = [TextColumn("{task.completed}/{task.total}"), BarColumn(None), TextColumn("{task.description}")]
        left = TimeRemainingColumn(elapsed_when_finished=True)
        self.bar = Bar(*columns, left, expand=True, disable=not self.terminal, auto_refresh=False)
        self.task = self.bar.add_task("compiling", total=steps, completed=start)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def say(self, words: str) -> None:
        """Print a line above the bar."""
        if self.terminal:
            self.bar.console.print(words, markup=False, highlight=False)
        elif self.plain:
            print(words, flush=True)

    def clock(self, step: int) -> float | None:
        """Note that `step` is done; give the steps a second of late, or None the first time."""
        self._done.append((time.monotonic(), step))
        return self._rate()

    def evaluated(self, step: int, scores: Mapping[str, float]) -> None:
        """Show from now on what the evaluation after `step` found."""
        self.tested = f"evaluation at {step}: {in_words(scores)}" if scores else ""

    def show(self, step: int, metrics: Mapping[str, Any], speed: str = "", memory: int | None = None) -> None:
        """Show that `step` is done."""
        shown = {name: value for name, value in metrics.items() if name not in QUIET}
        words = "  ".join(filter(None, [in_words(shown), self.tested, speed, gib(memory) if memory else ""]))
        self.bar.update(self.task, completed=step, description=words)
        self.bar.refresh()
        tenth, now = 10 * step // max(self.steps, 1), time.monotonic()
        if self.plain and (tenth > self._tenth or now - self._said_at > self.every):
            self._tenth, self._said_at = tenth, now
            print(f"{step}/{self.steps}  {words}  {self._left(step)} left", flush=True)

    def _rate(self) -> float | None:
        if len(self._done) < 2:
            return None
        (begun, first), (now, last) = self._done[0], self._done[-1]
        return (last - first) / max(now - begun, 1e-9)

    def _left(self, step: int) -> str:
        rate = self._rate()
        seconds = round((self.steps - step) / rate) if rate else None
        return "?" if seconds is None else f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def in_words(numbers: Mapping[str, Any]) -> str:
    """Numbers by name on one line."""
    return "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
