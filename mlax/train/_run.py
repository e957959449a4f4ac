"""The folder of a training run: its lock, configuration, curves, report and checkpoints, and resuming."""

import contextlib
import dataclasses
import fcntl
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax

from mlax.train._curves import read_records
from mlax.train._metrics import truncate_log
from mlax.train._state import TrainState
from mlax.train.checkpoints._checkpoints import Checkpoints, Maximize, Minimize
from mlax.train.checkpoints._restore import TargetMismatch


class Run:
    """`config.json`, `metrics.jsonl`, `curves.png`, `report.md` and `checkpoints/` in one folder.

    One process at a time may train in it: the second is refused. Without a folder nothing is written.
    """

    def __init__(self, folder: str | os.PathLike[str] | None):
        self.folder = None if folder is None else Path(folder)
        self.leads = jax.process_index() == 0  # of several processes only one writes
        self._lock: Any = None
        self._drawing: subprocess.Popen[bytes] | None = None
        self._drawn_at = time.monotonic()

    def path(self, name: str) -> Path | None:
        """Where a file of this run lies, if there is a folder."""
        return None if self.folder is None else self.folder / name

    def __enter__(self) -> Self:
        if self.folder is None or not self.leads:
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise RuntimeError(
                f"another process is training in {self.folder}; wait for it, stop it, or choose another folder."
            ) from None
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_drawing()
        if self._lock is not None:
            self._lock.close()

    def settle(self, config: Mapping[str, Any]) -> None:
        """Write the configuration."""
        path = self.path("config.json")
        if path is not None and self.leads:
            path.write_text(json.dumps(config, indent=2, default=str) + "\n")

    def changed(self, config: Mapping[str, Any]) -> list[str]:
        """What differs from the configuration of the same run before, in words."""
        path = self.path("config.json")
        if path is None:
            return []
        before, now = _read_json(path), json.loads(json.dumps(config, default=str))
        words: list[str] = []
        for name in ("step", "feed", "evaluate", "config"):
            old, new = before.get(name), now.get(name)
            if name not in before or old == new:
                continue
            if isinstance(old, dict) and isinstance(new, dict):
                keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
                words += [f"{key} was {old.get(key)!r} and is now {new.get(key)!r}" for key in keys]
            else:
                was, is_now = _differing_words(str(old), str(new))
                words.append(f"{name} was {was} and is now {is_now}")
        return words

    def draw(self, *, every: float = 60.0, last: bool = False) -> None:
        """Have the curves drawn by a process of its own at low priority, or the last time wait until they are."""
        metrics, curves = self.path("metrics.jsonl"), self.path("curves.png")
        if metrics is None or curves is None or not self.leads or not metrics.exists() or not _has_matplotlib():
            return
        busy = self._drawing is not None and self._drawing.poll() is None
        if not last and (busy or time.monotonic() - self._drawn_at < every):
            return
        if self._drawing is not None and busy:  # with fewer metrics; done later, it would take the place of the last
            self._drawing.terminate()
            self._drawing.wait()
        self._drawn_at = time.monotonic()
        self._stop_drawing()
        script = Path(__file__).with_name("_curves.py")
        with contextlib.suppress(OSError):  # a picture is not worth a run
            self._drawing = subprocess.Popen(
                ["nice", "-n", "0" if last else "19", sys.executable, str(script), str(curves), str(metrics)],
                stderr=subprocess.DEVNULL,
            )
            if last:
                self._drawing.wait()

    def _stop_drawing(self) -> None:
        if self._drawing is not None:
            self._drawing.terminate()  # a picture is there whole or not at all
            self._drawing.wait()

    def report(self, title: str, facts: Mapping[str, Any]) -> None:
        """Write what was done and what came of it."""
        path = self.path("report.md")
        if path is None or not self.leads:
            return
        scores = [record for record in read_records(path.with_name("metrics.jsonl")) if "evaluation" in record]
        lines = [f"# {title}", "", *(f"- **{name}**: {value}" for name, value in facts.items()), ""]
        if scores:
            names = list(scores[-1]["evaluation"])
            lines += ["| step | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
            shown = scores if len(scores) <= 12 else [*scores[:: len(scores) // 10], scores[-1]]
            lines += [
                f"| {r['step']:,} | " + " | ".join(_format_score(r["evaluation"].get(name)) for name in names) + " |"
                for r in shown
            ]
        lines += ["", "![curves](curves.png)", ""]
        with contextlib.suppress(OSError):
            path.write_text("\n".join(lines))


def configuration(**parts: Any) -> dict[str, Any]:
    """What a run was made of, in plain values: the parts as they print, and the machine."""
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
    """What was typed to start this process."""
    return shlex.join([os.path.basename(sys.orig_argv[0]), *sys.orig_argv[1:]]) if sys.orig_argv else ""


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and type(value).__repr__ is not repr:
        with contextlib.suppress(TypeError):
            return dataclasses.asdict(value)
    return value if isinstance(value, dict | int | float | str | bool) else repr(value)


def _differing_words(old: str, new: str) -> Iterator[str]:
    """Two texts without what they share at either end, but for two words that lead to the difference."""
    texts = old.split(), new.split()
    head = _common_prefix_length(*texts)
    tail = _common_prefix_length(*(text[head:][::-1] for text in texts))
    head = max(head - 2, 0)
    for text in texts:
        yield " ".join(["..."] * (head > 0) + text[head : len(text) - tail] + ["..."] * (tail > 0))


def _common_prefix_length(old: list[str], new: list[str]) -> int:
    """With how many equal words two texts begin."""
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


def open_checkpoints(folder: Run, keep: int, best: Maximize | Minimize | None, resume: bool) -> Checkpoints | None:
    """The checkpoints of a run, if it has a folder; one that is not to be resumed must have none."""
    if folder.folder is None:
        return None
    checkpoints = Checkpoints(folder.folder / "checkpoints", keep=keep, best=best)
    if not resume and checkpoints.latest() is not None:
        raise FileExistsError(
            f"fit: {folder.folder} holds a run at step {checkpoints.latest()}, and resume=False would write over it; "
            "choose another folder, or remove this one."
        )
    return checkpoints


def restore_latest(
    folder: Run, checkpoints: Checkpoints | None, state: TrainState
) -> tuple[int, TrainState, Mapping[str, Any]]:
    """The step to go on from, its state, and what was noted with it."""
    at, notes = int(state.step), {}
    if checkpoints is not None and checkpoints.latest() is not None:
        try:
            restored = checkpoints.restore(state)
        except TargetMismatch as error:
            raise ValueError(
                f"fit: {folder.folder} holds the run of another model or optimizer: {error.fault}; "
                "choose another folder for run=, or put the old ones back."
            ) from None
        jax.tree.map(lambda leaf: leaf.delete(), state)  # donated, as it would be by the first step
        at, state, notes = restored.step, restored.tree, restored.notes
    metrics = folder.path("metrics.jsonl")
    if metrics is not None and folder.leads:
        truncate_log(metrics, at)
    return at, state, notes


def record_config(folder: Run, parts: Mapping[str, Any], at: int, steps: int) -> list[str]:
    """Note the configuration of a run, and give what is not as it was when it began, in words.

    A run that is finished stays as it is, and cannot be of something else.
    """
    changed = folder.changed(parts)
    if changed and at >= steps:
        raise ValueError(
            f"fit: {folder.folder} holds a finished run, {at} of {steps} steps, of something else "
            f"({'; '.join(changed)}); choose another folder for this one."
        )
    if at < steps:
        folder.settle(parts)
    return [f"changed since this run began: {words}" for words in changed]


def describe_key(state: TrainState) -> str:
    """The key of a run, as numbers."""
    return f"{jax.random.key_impl(state.rng)} {jax.random.key_data(state.rng).tolist()}"
