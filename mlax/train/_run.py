"""The folder of a training run: its lock, configuration, curves, report and weights, and resuming from it."""

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from mlax import files
from mlax.core import Tree, flatten_paths
from mlax.inspect import write_report
from mlax.optim import Optimizer
from mlax.train._curves import parse_record, read_lines
from mlax.train._fingerprint import ABSENT, KEY, MAX_CHANGE, WEIGHTS, describe_change, differences
from mlax.train._metrics import truncate_log
from mlax.train._state import TrainState
from mlax.train.checkpoints._checkpoints import Checkpoints, Maximize, Minimize
from mlax.train.checkpoints._multiprocess import broadcast_text
from mlax.train.checkpoints._restore import TargetMismatch

Resume = bool | Literal["anyway", "restart"]


class RunFolder:
    """The folder of a run: `config.json`, `metrics.jsonl`, `curves.png`, `report.md`, `report.html`, `checkpoints/`.

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
        self._lock_folder()
        return self

    def _lock_folder(self) -> None:
        if self.root is None or not self.is_main:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = files.lock_file(str(self.root / "lock"))
        except OSError as error:
            if error.errno not in files.NO_LOCKS_ERRNOS:
                raise
            print(f"{self.root} cannot be locked ({error.strerror}): start no second run in it", file=sys.stderr)
            return
        if self._lock is None:
            raise RuntimeError(
                f"another process is training in {self.root}; wait for it, stop it, or choose another folder."
            )
        files.remove_unfinished(str(self.root))

    def __exit__(self, *error: object) -> None:
        self._stop_plotting()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            files.unlock_file(self._lock)
            self._lock = None

    def move_aside(self) -> str:
        """Rename the folder, if it holds anything, and lock a new one; returns a message about it."""
        message = ""
        if self.root is not None and self.is_main and any(each.name != "lock" for each in self.root.iterdir()):
            root = self.root.resolve()  # a link to another disk stays
            names = (root.with_name(f"{root.name}-before-{number}") for number in itertools.count(1))
            aside = next(name for name in names if not os.path.lexists(name))
            try:
                root.rename(aside)  # with its lock, which is held until there is another
                root.mkdir()
            except OSError as error:
                raise OSError(
                    f"fit: {self.root} cannot be moved aside, to {aside} ({error.strerror}); choose another folder."
                ) from None
            previous, self._lock = self._lock, None
            self._lock_folder()
            if previous is not None:
                files.unlock_file(previous)
            message = f"the run that was in {self.root} is now in {aside}, and a new one starts"
        return broadcast_text(message, jax.process_count())  # the others must not look into the folder before

    def read_config(self) -> tuple[dict[str, Any], str]:
        """The configuration that the run had before, empty if there is none, and what is wrong with its file, if so."""
        path = self.path("config.json")
        if path is None or not os.path.lexists(path):
            return {}, "" if path is None else f"{path}: there is no such file."
        try:
            with files.safe_open(str(path)) as (file, _):
                return files.parse_json(file.read(), str(path), depth=100), ""
        except (OSError, files.InvalidFile) as error:
            return {}, str(error)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the configuration."""
        path = self.path("config.json")
        if path is not None and self.is_main:
            self._write(path, json.dumps(config, indent=2) + "\n")

    def _write(self, path: Path, text: str) -> None:
        try:
            files.atomic_write(str(path), [text.encode()])
        except OSError as error:  # such as a full disk, which ends no training
            print(f"{path} cannot be written: {error}", file=sys.stderr)

    def update_curves(self, *, every: float = 60.0, last: bool = False) -> None:
        """Plot the curves in a low-priority subprocess, unless it did within `every` seconds; the `last` time, wait."""
        if not last and time.monotonic() - self._plotted_at < every:
            return
        metrics, curves = self.path("metrics.jsonl"), self.path("curves.png")
        if metrics is None or curves is None or not self.is_main or not metrics.exists() or not _has_matplotlib():
            return
        if not last and self._plotting is not None and self._plotting.poll() is None:
            return
        self._stop_plotting()  # it has fewer metrics, and finishing later would overwrite the last plot
        self._plotted_at = time.monotonic()
        script = Path(__file__).with_name("_curves.py")
        with contextlib.suppress(OSError):  # a plot is not worth a run
            self._plotting = subprocess.Popen(
                ["nice", "-n", "0" if last else "19", sys.executable, "-P", str(script), str(curves), str(metrics)],
                stderr=subprocess.DEVNULL,
            )
            if last and self._plotting.wait():
                print(f"{curves} could not be drawn; `mlax plot {self.root}` shows why", file=sys.stderr)

    def _stop_plotting(self) -> None:
        if self._plotting is not None:
            self._plotting.terminate()  # safe at any time: the file is replaced atomically
            self._plotting.wait()

    def write_report(self, title: str, facts: Mapping[str, Any]) -> None:
        """Write these facts, a table of the evaluations, and the curves, in Markdown."""
        path = self.path("report.md")
        if path is None or not self.is_main:
            return
        lines = (line for line in read_lines(path.with_name("metrics.jsonl")) if b'"evaluation"' in line)
        records = [record for line in lines if "evaluation" in (record := parse_record(line) or {})]
        text = [
            f"# {title}",
            "",
            *(f"- **{name}**: {format_fact(value)}" for name, value in public_config(facts).items()),
            "",
        ]
        text += [*_evaluation_table(records), "", "![curves](curves.png)", ""]
        text += ["[What JAX and XLA made of the training step](report.html)", ""]
        self._write(path, "\n".join(text))


def write_html_report(run: RunFolder, step: Any, state: TrainState, warn: Callable[[str], None]) -> None:
    """Write report.html, what JAX and XLA made of the step; a failure is only reported."""
    path = run.path("report.html")
    if path is None or not run.is_main or not step.last_compiled.compiled:
        return
    try:
        variables = list(flatten_paths(state.trainables).items())
        write_report(path, "training step", step, *step.last_compiled.stages(), variables=variables)
    except Exception as failure:  # the training is done and saved
        warn(f"report.html was not written: {failure}")


def _evaluation_table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    if not records:
        return []
    names = list(records[-1]["evaluation"])
    rows = records if len(records) <= 12 else [*records[:: len(records) // 10], records[-1]]
    cells = ([f"{row['step']:,}", *(_format_score(row["evaluation"].get(name)) for name in names)] for row in rows)
    return [
        "| step | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
        *("| " + " | ".join(row) + " |" for row in cells),
    ]


def open_checkpoints(run: RunFolder, keep: int, best: Maximize | Minimize | None, resume: Resume) -> Checkpoints | None:
    """The checkpoints of a run, None without a folder; with `resume=False` there must be none yet."""
    if run.root is None:
        return None
    checkpoints = Checkpoints(run.root / "checkpoints", keep=keep, best=best)
    try:
        latest = checkpoints.latest()
    except files.InvalidFile as error:
        error.add_note('fit: resume="restart" moves this run aside and starts over.')
        raise
    if resume is False and latest is not None:
        raise FileExistsError(
            f"fit: {run.root} holds a run at step {latest}, which resume=False would overwrite; choose "
            'another folder, or pass resume="restart" to move this one aside and start over.'
        )
    return checkpoints


def restore_latest(
    run: RunFolder, checkpoints: Checkpoints | None, state: TrainState
) -> tuple[int, TrainState, Mapping[str, Any]]:
    """The step to resume from, its state and its notes, from the last checkpoint or else from `state`."""
    if checkpoints is None or checkpoints.latest() is None:
        return int(jnp.copy(state.step)), state, {}  # of a copy, as JAX 0.11 donates no array that was read on the CPU
    try:
        restored = checkpoints.restore(state)
    except TargetMismatch as error:
        raise ValueError(
            f"fit: {run.root} holds the run of another model or optimizer: {error.fault}; "
            'choose another folder for run=, change them back, or pass resume="restart" to move that run aside and '
            "start over."
        ) from None
    return restored.step, restored.tree, restored.notes


def delete_leaves(state: TrainState) -> None:
    """Free a state that a restored one replaces, as the first step would by donation."""
    jax.tree.map(lambda leaf: leaf.delete(), state._replace(rng=None))  # a step does not donate the key either


def trim_log(run: RunFolder, at: int) -> str:
    """Drop the records of the steps that run again; returns a warning about damaged lines, if there are any."""
    metrics = run.path("metrics.jsonl")
    damaged = 0 if metrics is None or not run.is_main else truncate_log(metrics, at)
    return f"{metrics}: {damaged} damaged lines are left out" if damaged else ""


class ConfigChanges(NamedTuple):
    """How the configuration of a run differs from the one that it had before."""

    refused: list[str]  # what makes it another experiment
    announced: list[str]  # anything else
    fault: str  # why the one before could not be read, if so

    def warnings(self, *, resumed: bool) -> list[str]:
        """What to print about a run that is resumed."""
        if not resumed:
            return []
        fault = [f"{self.fault} So changes of the run cannot be noticed."] * bool(self.fault)
        return fault + [f"changed since this run started: {change}" for change in self.refused + self.announced]


def compare_config(run: RunFolder, config: dict[str, Any]) -> ConfigChanges:
    """Compare the configuration with that of the run in the folder: in the first process, for all of them.

    The first weights are unknown where training continues with a later state; those of the run are then kept.
    """
    changes = _find_changes(run, config) if run.is_main else ConfigChanges([], [], "")
    if jax.process_count() == 1:
        return changes
    text = json.dumps([changes.refused[:6], changes.announced[:6], changes.fault[:MAX_CHANGE]])
    return ConfigChanges(*json.loads(broadcast_text(text, jax.process_count())))


def _find_changes(run: RunFolder, config: dict[str, Any]) -> ConfigChanges:
    before, fault = run.read_config()
    marks = _as_dict(before.get("fingerprint"))
    found = list(differences(marks, config["fingerprint"]))
    # data that are mapped now and were not before, or the reverse, may be the same: a map may only look at them
    refused = [describe_change(*each) for each in found if ABSENT not in each]
    announced = [describe_change(*each) for each in found if ABSENT in each]
    for name in ("step", "feed", "evaluate", "best", "config"):
        old, new = before.get(name), config.get(name)
        if name not in before or old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            announced += [f"{key} was {old.get(key)!r} and is now {new.get(key)!r}" for key in keys]
        else:
            announced.append(describe_change(name, str(old), str(new)))
    for name in {KEY, WEIGHTS} & marks.keys():
        config["fingerprint"].setdefault(name, marks[name])
    return ConfigChanges(refused, announced, fault)


def check_config(
    run: RunFolder, changes: ConfigChanges, at: int, steps: int, resume: Resume, *, finished: bool = False
) -> None:
    """Refuse to continue another experiment, or to return the result of a finished one, unless `resume` allows it.

    A run that ended early is `finished`, too.
    """
    finished = finished or at >= steps
    changed = changes.refused + (changes.announced if finished else [])
    if changed and resume != "anyway":
        state = f"a finished run, {at} of {steps} steps," if finished else f"a run at step {at} of {steps}"
        raise ValueError(
            f"fit: {run.root} holds {state} of another configuration ({'; '.join(changed)}); choose another folder for "
            'this one, or pass resume="anyway" to continue all the same, or resume="restart" to move the old run aside '
            "and start over."
        )


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


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


def public_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration that is for people, without hashes."""
    return {name: value for name, value in config.items() if name != "fingerprint"}


def command() -> str:
    """The command line of this process, as it was typed."""
    typed = sys.orig_argv
    if len(typed) > 1 and os.path.basename(typed[1]) == "mlax":  # whose first line has the interpreter
        typed = ["mlax", *typed[2:]]
    return shlex.join(typed)


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
    variables = dict(zip(("trainables", "non_trainables"), state.eval_variables(optimizer), strict=True))
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
    """The value in what JSON can express, so that it compares equal to what is read back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _to_plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(each) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value if isinstance(value, int | str | None) or _is_finite(value) else repr(value)


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _format_score(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def format_fact(value: Any) -> str:
    """A value of a configuration, on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {format_fact(each)}" for name, each in value.items())
    return _format_score(value) if isinstance(value, float) else str(value)


def _has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None
