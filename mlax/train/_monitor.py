"""Monitoring of a training run: the log, a progress bar with throughput, loggers and curves."""

import collections
import contextlib
import math
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax

from mlax.core import Tree, flatten_paths, signature
from mlax.inspect import format_bytes, scope_table, used_bytes
from mlax.train._loggers import Logger, LoggerGroup
from mlax.train._metrics import Metrics, MetricsLog, Record
from mlax.train._run import RunFolder, format_fact, public_config
from mlax.train._step import Step

# Dense bfloat16 FLOP/s without sparsity, from the vendors' data sheets. The first name that occurs in the name of the
# device counts: of a card with several variants, the slower ones come first.
PEAK_FLOPS = {
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "TPU v4 lite": 138e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}
# The terminal may be gone, closed, or unable to show a character: no reason to lose a training.
PRINT_ERRORS = (OSError, ValueError)
REFRESH = 1.0  # seconds between two drawings of the progress bar, each of which takes the time of some small steps
NOT_SHOWN = ("skipped", "gradient_norm", "scale", "step", "seconds")  # on the progress bar


class Monitor:
    """Logs and shows the progress of a run."""

    def __init__(
        self,
        run: RunFolder,
        step: Step,
        feed: Any,
        start: int,
        steps: int,
        *,
        loggers: Sequence[Logger] = (),
        config: Mapping[str, Any] | None = None,
        show: bool = True,
    ):
        self.run, self.step, self.start, self.config = run, step, start, config or {}
        self.log = MetricsLog(run.path("metrics.jsonl") if run.is_main else None, steps_per_call=step.steps_per_call)
        self.progress = Progress(start, steps, show=show and run.is_main)
        self.loggers = LoggerGroup(loggers if run.is_main else (), self.progress.warn)
        self.examples = getattr(feed, "batch", 0)
        self.print, self.warn = self.progress.print, self.progress.warn
        self._flops: int | None = None

    def __enter__(self) -> Self:
        self.loggers.start(self.run.root, self.start, self.config)
        self.progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.log.flush()
        self.loggers.close()
        self.progress.__exit__()

    def print_layers(self, trainables: Tree) -> None:
        """In a terminal, print the layers of the step that was traced, with their parameters and FLOPs."""
        traced = self.step.aot.last_traced or self.step.overriding_aot.last_traced
        if self.progress.terminal and traced is not None:
            self.print(scope_table(traced.jaxpr, flatten_paths(trainables).items()))

    def log_metrics(self, at: int, metrics: Metrics, *, wait: bool = False) -> list[Record]:
        """Log the metrics of the call that ended with step `at`; returns the records of the steps known to be done.

        With `wait` these include step `at`, as they must before anything is saved.
        """
        if self._flops is None:
            self._flops = self.step.flops()
            self.progress.tick(at)
        records = self.log.add(at, metrics)
        return self._show(records + (self.log.read() if wait else []))

    def log_rest(self) -> list[Record]:
        """Log and return the records of all steps that were not known to be done; waits for them."""
        return self._show(self.log.read())

    def _show(self, records: list[Record]) -> list[Record]:
        if records:
            done = records[-1]["step"]
            speed = format_throughput(self.progress.tick(done), self.examples, self._flops or 0)
            self.progress.show(done, records[-1], speed, used_bytes(jax.local_devices()[0]))
            for record in records:
                self.loggers.log_record(record)
            self.run.update_curves()
        return records

    def log_event(self, at: int, event: str, **details: Any) -> None:
        """Log that something happened at step `at`."""
        self.log.write({"step": at, "event": event, **details})

    def log_evaluation(self, at: int, scores: Mapping[str, float], *, prefix: str = "") -> None:
        """Log the scores of the evaluation after step `at`; loggers get their names with a prefix."""
        self.log.write({"step": at, "evaluation": dict(scores)})
        self.log.flush()
        self.loggers.log(at, {f"{prefix}{name}": value for name, value in scores.items()})
        self.progress.show_evaluation(at, scores)


class Progress:
    """A progress bar with step, metrics, throughput and time left in a terminal; in a notebook, a line that changes.

    Elsewhere, such as in a file, a line now and then.
    """

    def __init__(self, start: int, steps: int, *, show: bool = True, every: float = 20.0):
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.steps, self.every = steps, every
        self.terminal = show and sys.stdout.isatty()
        self.plain = show and not self.terminal
        self.notebook = NotebookLine(shell) if self.plain and (shell := notebook_shell()) is not None else None
        self._evaluation = ""  # the last one, formatted
        self._ticks: collections.deque[tuple[float, int]] = collections.deque(maxlen=40)  # (time, steps done by then)
        self._printed_at, self._tenth = time.monotonic(), 10 * start // max(steps, 1)
        self._drawn_at = -math.inf
        columns = [TextColumn("{task.completed}/{task.total}"), BarColumn(None), TextColumn("{task.description}")]
        remaining = TimeRemainingColumn(elapsed_when_finished=True)
        self.bar = Bar(*columns, remaining, expand=True, disable=not self.terminal, auto_refresh=False)
        self.task = self.bar.add_task("compiling", total=steps, completed=start)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(*PRINT_ERRORS):
            self.bar.stop()

    def print(self, text: str) -> None:
        """Print text above the bar."""
        with contextlib.suppress(*PRINT_ERRORS):
            if self.terminal:
                self.bar.console.print(text, markup=False, highlight=False)
            elif self.plain:
                print(text, flush=True)

    def warn(self, text: str) -> None:
        """Print text that must be seen: on stderr if nothing is shown. Without text, nothing."""
        if text and (self.terminal or self.plain):
            self.print(text)
        elif text:
            with contextlib.suppress(*PRINT_ERRORS):
                print(text, file=sys.stderr, flush=True)

    def tick(self, step: int) -> float | None:
        """Record that `step` is done; returns the recent steps per second, None as long as they are unknown."""
        self._ticks.append((time.monotonic(), step))
        return self._steps_per_second()

    def show(self, step: int, metrics: Mapping[str, Any], speed: str = "", memory: int | None = None) -> None:
        """Show that `step` is done."""
        shown = {name: value for name, value in metrics.items() if name not in NOT_SHOWN}
        parts = [format_values(shown), self._evaluation, speed, format_bytes(memory) if memory else ""]
        text = "  ".join(filter(None, parts))
        tenth, now = 10 * step // max(self.steps, 1), time.monotonic()
        with contextlib.suppress(*PRINT_ERRORS):
            self.bar.update(self.task, completed=step, description=text)
            if now - self._drawn_at >= REFRESH or step >= self.steps:
                self._drawn_at = now
                self.bar.refresh()
        line = "  ".join(filter(None, (f"{step}/{self.steps}", text, self._time_left(step))))
        if self.notebook is not None:
            self.notebook.show(line)
        elif self.plain and (tenth > self._tenth or now - self._printed_at > self.every):
            self._tenth, self._printed_at = tenth, now
            self.print(line)

    def show_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Show the scores of the evaluation after `step`, until the next one."""
        self._evaluation = f"evaluation at {step}: {format_values(scores)}" if scores else ""

    def _steps_per_second(self) -> float | None:
        if not self._ticks:
            return None
        (start, first), (now, last) = self._ticks[0], self._ticks[-1]
        return (last - first) / max(now - start, 1e-9) if last > first else None

    def _time_left(self, step: int) -> str:
        rate = self._steps_per_second()
        if rate is None:
            return ""
        seconds = round((self.steps - step) / rate)
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"


class NotebookLine:
    """A line of output in a Jupyter notebook, each text of which replaces the one before."""

    def __init__(self, shell: Any):
        self._publisher = shell.display_pub
        self._transient = {"display_id": secrets.token_hex(16)}
        self._shown = False

    def show(self, text: str) -> None:
        """Show this text."""
        with contextlib.suppress(Exception):  # whatever a front end does, it must not end a training
            self._publisher.publish({"text/plain": text}, transient=self._transient, update=self._shown)
            self._shown = True


def notebook_shell() -> Any:
    """The IPython shell of a Jupyter kernel, if this process is one; else None. Imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


def format_values(values: Mapping[str, Any]) -> str:
    """Values by name on one line."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


def format_throughput(rate: float | None, examples: int, flops: int) -> str:
    """Steps, examples and FLOPs per second, from steps per second, examples per step and FLOPs per step."""
    if rate is None:
        return ""
    text = f"{rate:.3g} steps/s  {rate * examples:,.0f} examples/s"
    per_device = rate * flops / jax.device_count()
    peak = peak_flops(jax.devices()[0])
    if peak:
        return f"{text}  {per_device / peak:.1%} of peak"
    return f"{text}  {per_device / 1e9:.3g} GFLOP/s" if flops else text


def peak_flops(device: Any) -> float | None:
    """The peak FLOP/s of a device according to its vendor; None if it is not in the table, as CPUs are not."""
    return next((flops for name, flops in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", device.device_kind)), None)


def describe_run(run: RunFolder, config: Mapping[str, Any], trainables: Tree, at: int, cache: str | None) -> str:
    """The configuration of a run, the folder of the compilation cache, and a table of the model's parameters."""
    where = "no folder: nothing is saved" if run.root is None else f"{run.root}"
    lines = {"run": f"{where}, resumes from step {at}" if at else where, **public_config(config)}
    if cache is not None:
        lines["cache"] = f"{cache} (compiled programs)"
    width = max(map(len, lines)) + 2
    table = parameter_table(trainables)
    return "\n".join([*(f"{name:{width}}{format_fact(value)}" for name, value in lines.items()), "parameters", table])


def parameter_table(trainables: Tree, *, max_rows: int = 24) -> str:
    """Path, shape and size of each leaf, or of each part if there are too many leaves; then the total."""
    leaves = flatten_paths(trainables)
    rows = [(path, signature(leaf), math.prod(leaf.shape)) for path, leaf in leaves.items()]
    depth = 3
    while len(rows) > max_rows and depth:
        rows = _group_by_prefix(leaves, depth)
        depth -= 1
    count = sum(math.prod(leaf.shape) for leaf in leaves.values())
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())
    total = ("all parameters", format_bytes(size), count)
    width = [max(len(str(row[i])) for row in [*rows, total]) for i in (0, 1)]
    return "\n".join(f"  {path:{width[0]}}  {what:{width[1]}}  {number:>12,}" for path, what, number in [*rows, total])


def _group_by_prefix(leaves: dict[str, Any], depth: int) -> list[tuple[str, str, int]]:
    groups: dict[str, list[Any]] = collections.defaultdict(list)
    for path, leaf in leaves.items():
        groups["/".join(path.split("/")[:depth])].append(leaf)
    return [
        (
            path,
            f"{len(group)} arrays" if len(group) > 1 else signature(group[0]),
            sum(math.prod(x.shape) for x in group),
        )
        for path, group in groups.items()
    ]
