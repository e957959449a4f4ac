"""Progress of a training run for people: the log, a progress bar, throughput, TensorBoard."""

import collections
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax

from mlax.core import Tree, flatten_paths, signature
from mlax.inspect import flops, format_bytes, used_bytes
from mlax.train._divergence import Divergence
from mlax.train._metrics import Metrics, MetricsLog
from mlax.train._run import Run
from mlax.train._state import TrainState
from mlax.train._step import Step
from mlax.train.checkpoints._checkpoints import Checkpoints


class Monitor:
    """Shows and notes how training goes, and looks after steps that were not finite."""

    def __init__(
        self, run: Run, step: Step, feed: Any, start: int, steps: int, rollbacks: int, tensorboard: bool, show: bool
    ):
        self.run, self.step, self.steps = run, step, steps
        self.log = MetricsLog(run.path("metrics.jsonl") if run.leads else None, many=step.many)
        self.board = TensorBoard(run.path("tensorboard") if tensorboard and run.leads else None, start=start)
        self.progress = Progress(start, steps, show=show)
        self.skipping = Divergence(feed, rollbacks=rollbacks)
        self.examples = getattr(feed, "batch", 0)
        self.say = self.progress.say
        self._flops: int | None = None

    def __enter__(self) -> Self:
        self.progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.log.flush()
        self.board.close()
        self.progress.__exit__()

    def after(
        self,
        at: int,
        metrics: Metrics,
        state: TrainState,
        checkpoints: Checkpoints | None,
        *,
        caught_up: bool = False,
    ) -> TrainState:
        """Take the metrics of the call that ended with step `at`; give the state to go on with.

        With `caught_up` all that is known by then is read, as it must be before anything is saved.
        """
        if self._flops is None:
            self._flops = flops(self.step.once.program()[0].jaxpr) // self.step.many
            self.progress.clock(at)
        records = self.log.add(at, metrics)
        if caught_up:
            records += self.log.read()
        if not records:
            return state
        done = records[-1]["step"]
        words = throughput(self.progress.clock(done), self.examples, self._flops)
        self.progress.show(done, records[-1], words, used_bytes(jax.local_devices()[0]))
        self.board.add(records)
        self.run.draw()
        return self.skipping.after(records, state, checkpoints, self.log, self.say)

    def evaluated(self, at: int, scores: Mapping[str, float]) -> Mapping[str, float]:
        """Note the scores of an evaluation, and give them back."""
        self.log.write({"step": at, "evaluation": dict(scores)})
        self.log.flush()
        self.board.add([{"step": at, **scores}], "evaluation")
        self.progress.evaluated(at, scores)
        return scores


NOT_SHOWN = ("skipped", "gradient_norm", "scale", "step", "seconds")  # not worth room on a line


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
        self.tested = f"evaluation at {step}: {format_values(scores)}" if scores else ""

    def show(self, step: int, metrics: Mapping[str, Any], speed: str = "", memory: int | None = None) -> None:
        """Show that `step` is done."""
        shown = {name: value for name, value in metrics.items() if name not in NOT_SHOWN}
        words = "  ".join(
            filter(None, [format_values(shown), self.tested, speed, format_bytes(memory) if memory else ""])
        )
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


def format_values(numbers: Mapping[str, Any]) -> str:
    """Numbers by name on one line."""
    return "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())


# Dense bfloat16 operations a second without sparsity, as the makers' data sheets give them. The first name whose words
# are in that of the device is taken: of one card in several forms, the slower forms come first.
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


def peak_flops(device: Any) -> float | None:
    """The operations a second that the device is sold with; None if it is not in the list, as no CPU is."""
    return next((flops for name, flops in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", device.device_kind)), None)


def throughput(rate: float | None, examples: int, flops: int) -> str:
    """The speed in words, from steps a second, examples a step and operations a step over all devices."""
    if rate is None:
        return ""
    words = f"{rate:.3g} steps/s  {rate * examples:,.0f} examples/s"
    each = rate * flops / jax.device_count()
    most = peak_flops(jax.devices()[0])
    if most:
        return f"{words}  {each / most:.1%} of peak"
    return f"{words}  {each / 1e9:.3g} GFLOP/s" if flops else words


class TensorBoard:
    """Writes records as scalars into a folder that `tensorboard --logdir` shows. Without a folder, nothing.

    `start` is the step that training goes on from: what was written of later steps, which come again, is hidden.
    """

    def __init__(self, folder: Path | None, start: int | None = None):
        self._writer: Any = None
        if folder is not None:
            try:
                from tensorboardX import SummaryWriter
            except ImportError:
                raise ImportError("tensorboard=True needs tensorboardX; pip install 'mlax[train]'.") from None
            # Points from `purge_step` on are hidden, and that of `start` itself does not come again. A file is named by
            # the second in which it was made and written over by one of the same name: hence the step in the name.
            purged = None if start is None else start + 1
            self._writer = SummaryWriter(str(folder), purge_step=purged, filename_suffix=f".{start or 0:012}")

    def add(self, records: Sequence[Mapping[str, Any]], prefix: str = "train") -> None:
        """Add each number of each record."""
        if self._writer is None:
            return
        for record in records:
            for name, value in record.items():
                if name not in ("step", "seconds") and isinstance(value, int | float):
                    self._writer.add_scalar(f"{prefix}/{name}", value, record["step"])

    def close(self) -> None:
        """Write what waits."""
        if self._writer is not None:
            self._writer.close()


def describe_run(folder: Run, parts: Mapping[str, Any], changed: list[str], state: TrainState, at: int) -> str:
    """What is trained, on what, how, and a table of its parameters."""
    where = "nowhere: nothing is saved" if folder.folder is None else f"{folder.folder}"
    lines = {"run": f"{where}, goes on from step {at}" if at else where, **parts}
    width = max(map(len, lines)) + 2
    table = parameter_table(state.trainables)
    return "\n".join([*(f"{name:{width}}{value}" for name, value in lines.items()), *changed, "parameters", table])


def parameter_table(trainables: Tree, *, most: int = 24) -> str:
    """A line for each leaf, or for each part if there are too many leaves: path, shape, count; then the sum."""
    leaves = flatten_paths(trainables)
    rows = [(path, signature(leaf), math.prod(leaf.shape)) for path, leaf in leaves.items()]
    depth = 3
    while len(rows) > most and depth:
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
