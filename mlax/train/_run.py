"""The folder of a training run: its lock, configuration, curves, report and weights, and resuming from it."""

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import operator
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

from mlax import files
from mlax.core import Tree
from mlax.optim import Optimizer
from mlax.train._curves import read_records
from mlax.train._metrics import truncate_log
from mlax.train._state import TrainState
from mlax.train.checkpoints._checkpoints import Checkpoints, Maximize, Minimize
from mlax.train.checkpoints._restore import TargetMismatch


class RunFolder:
    """The folder of a run, with `config.json`, `metrics.jsonl`, `curves.png`, `report.md` and `checkpoints/`.

    While it is entered it is locked: a second process that enters it fails. Without a folder nothing is written.
    """

    def __init__(self, folder: str | os.PathLike[str] | None):
        self.root = None if folder is None else Path(folder)
        self.is_main = jax.process_index() == 0  # only this process writes
        self._lock: int | None = None  # a descriptor
        self._plotting: subprocess.Popen[bytes] | None = None
        self._plotted_at = time.monotonic()

    def path(self, name: str) -> Path | None:
        """The path of a file in the folder; None without a folder."""
        return None if self.root is None else self.root / name

    def __enter__(self) -> Self:
        if self.root is None or not self.is_main:
            return self
        self.root.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = files.lock_file(str(self.root / "lock"))
        except OSError as error:
            if error.errno not in files.NO_LOCKS_ERRNOS:
                raise
            print(f"{self.root} cannot be locked ({error.strerror}): start no second run in it", file=sys.stderr)
            return self
        if self._lock is None:
            raise RuntimeError(
                f"another process is training in {self.root}; wait for it, stop it, or choose another folder."
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_plotting()
        if self._lock is not None:
            os.close(self._lock)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the configuration."""
        path = self.path("config.json")
        if path is not None and self.is_main:
            path.write_text(json.dumps(config, indent=2, default=str) + "\n")

    def config_changes(self, config: Mapping[str, Any]) -> list[str]:
        """The differences from the configuration that the run had before, as phrases."""
        path = self.path("config.json")
        if path is None:
            return []
        before, now = _read_json(path), json.loads(json.dumps(config, default=str))
        changes: list[str] = []
        for name in ("step", "feed", "evaluate", "config"):
            old, new = before.get(name), now.get(name)
            if name not in before or old == new:
                continue
            if isinstance(old, dict) and isinstance(new, dict):
                keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
                changes += [f"{key} was {old.get(key)!r} and is now {new.get(key)!r}" for key in keys]
            else:
                old, new = _differing_words(str(old), str(new))
                changes.append(f"{name} was {old} and is now {new}")
        return changes

    def update_curves(self, *, every: float = 60.0, last: bool = False) -> None:
        """Plot the curves in a low-priority subprocess, unless it did within `every` seconds; the `last` time, wait."""
        metrics, curves = self.path("metrics.jsonl"), self.path("curves.png")
        if metrics is None or curves is None or not self.is_main or not metrics.exists() or not _has_matplotlib():
            return
        busy = self._plotting is not None and self._plotting.poll() is None
        if not last and (busy or time.monotonic() - self._plotted_at < every):
            return
        self._stop_plotting()  # it has fewer metrics, and finishing later would overwrite the last plot
        self._plotted_at = time.monotonic()
        script = Path(__file__).with_name("_curves.py")
        with contextlib.suppress(OSError):  # a plot is not worth a run
            self._plotting = subprocess.Popen(
                ["nice", "-n", "0" if last else "19", sys.executable, str(script), str(curves), str(metrics)],
                stderr=subprocess.DEVNULL,
            )
            if last:
                self._plotting.wait()

    def _stop_plotting(self) -> None:
        if self._plotting is not None:
            self._plotting.terminate()  # safe at any time: the file is replaced atomically
            self._plotting.wait()

    def write_report(self, title: str, facts: Mapping[str, Any]) -> None:
        """Write these facts, a table of the evaluations, and the curves, in Markdown."""
        path = self.path("report.md")
        if path is None or not self.is_main:
            return
        scores = [record for record in read_records(path.with_name("metrics.jsonl")) if "evaluation" in record]
        lines = [f"# {title}", "", *(f"- **{name}**: {value}" for name, value in facts.items()), ""]
        if scores:
            names = list(scores[-1]["evaluation"])
            lines += ["| step | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
            rows = scores if len(scores) <= 12 else [*scores[:: len(scores) // 10], scores[-1]]
            lines += [
                f"| {r['step']:,} | " + " | ".join(_format_score(r["evaluation"].get(name)) for name in names) + " |"
                for r in rows
            ]
        lines += ["", "![curves](curves.png)", ""]
        with contextlib.suppress(OSError):
            path.write_text("\n".join(lines))


def open_checkpoints(run: RunFolder, keep: int, best: Maximize | Minimize | None, resume: bool) -> Checkpoints | None:
    """The checkpoints of a run, None without a folder; with `resume=False` there must be none yet."""
    if run.root is None:
        return None
    checkpoints = Checkpoints(run.root / "checkpoints", keep=keep, best=best)
    if not resume and checkpoints.latest() is not None:
        raise FileExistsError(
            f"fit: {run.root} holds a run at step {checkpoints.latest()}, which resume=False would overwrite; "
            "choose another folder, or remove this one."
        )
    return checkpoints


def restore_latest(
    run: RunFolder, checkpoints: Checkpoints | None, state: TrainState
) -> tuple[int, TrainState, Mapping[str, Any]]:
    """The step to resume from, its state and its notes, from the last checkpoint or else from `state`."""
    at, notes = int(state.step), {}
    if checkpoints is not None and checkpoints.latest() is not None:
        try:
            restored = checkpoints.restore(state)
        except TargetMismatch as error:
            raise ValueError(
                f"fit: {run.root} holds the run of another model or optimizer: {error.fault}; "
                "choose another folder for run=, or change them back."
            ) from None
        jax.tree.map(lambda leaf: leaf.delete(), state)  # as the first step would, by donation
        at, state, notes = restored.step, restored.tree, restored.notes
    metrics = run.path("metrics.jsonl")
    if metrics is not None and run.is_main:
        truncate_log(metrics, at)
    return at, state, notes


def record_config(run: RunFolder, config: Mapping[str, Any], at: int, steps: int) -> list[str]:
    """Write the configuration of a run, and return what changed since it started, as lines to print.

    The folder of a finished run stays as it is; a changed configuration is then an error.
    """
    changes = run.config_changes(config)
    if changes and at >= steps:
        raise ValueError(
            f"fit: {run.root} holds a finished run, {at} of {steps} steps, of another configuration "
            f"({'; '.join(changes)}); choose another folder for this one."
        )
    if at < steps:
        run.write_config(config)
    return [f"changed since this run started: {change}" for change in changes]


def configuration(**parts: Any) -> dict[str, Any]:
    """The configuration of a run in plain values: its parts, the command and the machine."""
    devices = jax.devices()
    plain = {name: _to_plain(value) for name, value in parts.items() if value is not None}
    return {
        **plain,
        "command": command(),
        "devices": f"{len(devices)} {devices[0].device_kind} ({devices[0].platform})",
        "processes": jax.process_count(),
        "versions": f"Python {platform.python_version()}, JAX {jax.__version__}",
    }


def command() -> str:
    """The command line of this process."""
    return shlex.join([os.path.basename(sys.orig_argv[0]), *sys.orig_argv[1:]]) if sys.orig_argv else ""


def export_weights(
    run: RunFolder,
    optimizer: Optimizer,
    state: TrainState,
    checkpoints: Checkpoints | None,
    report: Callable[[str], None],
) -> None:
    """Write the weights to evaluate with, last and best. All processes must call it; the first one writes."""
    last, best = run.path("last.safetensors"), run.path("best.safetensors")
    if last is None or best is None or checkpoints is None:
        return
    try:
        _write_gathered(last, _inference_variables(optimizer, state))
        if checkpoints.criterion is not None and (number := checkpoints.best()) is not None:
            _write_gathered(best, _inference_variables(optimizer, checkpoints.restore(state, step=number).tree))
    except Exception as failure:  # the checkpoints hold everything, and `fit` should still return
        report(f"the weights could not be written to {last.parent}: {failure}")


def _inference_variables(optimizer: Optimizer, state: TrainState) -> Tree:
    trainables = optimizer.eval_trainables(state.optimizer, state.trainables)
    variables = {"trainables": trainables, "non_trainables": state.non_trainables}
    return {name: tree for name, tree in variables.items() if tree is not None}


def _write_gathered(path: Path, variables: Tree) -> None:
    gathered = jax.tree.map(_gather, variables)
    if jax.process_index() == 0:
        files.save(path, gathered)


def _gather(leaf: jax.Array) -> Any:
    """The whole leaf; if other processes hold parts of it, on the host of the first process only."""
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return leaf
    whole = multihost_utils.process_allgather(leaf, tiled=True)
    return whole if jax.process_index() == 0 else None


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        with contextlib.suppress(TypeError):
            return dataclasses.asdict(value)
    return value if isinstance(value, dict | int | float | str | bool) else repr(value)


def _differing_words(old: str, new: str) -> Iterator[str]:
    """Both texts without their common beginning and end, except for two words before the difference."""
    texts = old.split(), new.split()
    head = _common_prefix_length(*texts)
    tail = _common_prefix_length(*(text[head:][::-1] for text in texts))
    head = max(head - 2, 0)
    for text in texts:
        yield " ".join(["..."] * (head > 0) + text[head : len(text) - tail] + ["..."] * (tail > 0))


def _common_prefix_length(old: list[str], new: list[str]) -> int:
    return sum(itertools.accumulate(map(operator.eq, old, new), operator.and_))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except (json.JSONDecodeError, OSError):
        return {}


def _format_score(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None
