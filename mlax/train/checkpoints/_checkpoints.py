"""Checkpoints: saved training steps in a folder; atomic, asynchronous, verified."""

import json
import math
import operator
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from mlax.core import frozen, signature
from mlax.files import InvalidFile
from mlax.train.checkpoints._manifest import flatten_with_names
from mlax.train.checkpoints._multiprocess import ProcessGroup, all_processes_ok, broadcast_text, process_group
from mlax.train.checkpoints._restore import RestoredCheckpoint, StepReader, match_leaves, restore_leaf
from mlax.train.checkpoints._save import SaveJob, copy_to_host, read_manifest, write_checkpoint
from mlax.train.checkpoints._step_folders import MANIFEST, StepFolder, apply_retention, remove_leftovers, step_folders


@frozen
class Maximize:
    """The step whose metric is the highest; of equals the later one. Where it is missing or NaN, a step is not best."""

    metric: str

    def of(self, metrics: Mapping[int, Mapping[str, float]]) -> int | None:
        """The best of some steps, given their metrics."""
        return _best_step(metrics, self.metric, 1.0)


@frozen
class Minimize:
    """The step whose metric is the lowest; of equals the later one. Where it is missing or NaN, a step is not best."""

    metric: str

    def of(self, metrics: Mapping[int, Mapping[str, float]]) -> int | None:
        """The best of some steps, given their metrics."""
        return _best_step(metrics, self.metric, -1.0)


def _best_step(metrics: Mapping[int, Mapping[str, float]], name: str, sign: float) -> int | None:
    values = {step: sign * found[name] for step, found in metrics.items() if not math.isnan(found.get(name, math.nan))}
    return max(values, key=lambda step: (values[step], step), default=None)


class Checkpoints:
    """The steps in a folder: the last `keep` of them (None: all), and the best by a metric.

    `save` returns when the values are copied to the host; a thread writes them, in safetensors files with a manifest
    of hashes, and acknowledges the step by a rename after everything is synced. `restore` gives the newest step that
    verifies. Several processes save into one folder that all of them see.

    report  report(words) is told what nobody asked for, one sentence at a time: that an earlier save failed, inside
            the next `save`, if nobody took it by `failure` or `wait` before; that `restore` passed over a damaged
            step; and, when this object goes, that the last save failed. None writes to stderr.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        best: Maximize | Minimize | None = None,
        report: Callable[[str], None] | None = None,
        file_bytes: int = 1 << 30,
        patience: float = 600.0,
    ):
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"Checkpoints: keep is {keep!r}, but it is how many steps to keep, 1 or more; or None.")
        validate_best(best)
        self.folder = os.path.abspath(os.fspath(folder))
        self.keep, self.by = keep, best
        self.report = report or _print_report
        self.file_bytes, self.patience = file_bytes, patience
        # A thread that is there already: to start one would hand it the interpreter, for 5 ms, in the middle of `save`.
        self._writer = ThreadPoolExecutor(1, "mlax-checkpoints")
        self._running: Future[None] | None = None
        self._failures: list[BaseException] = []
        self._group: ProcessGroup | None = None
        self._saves = 0
        self._metrics: dict[StepFolder, Mapping[str, float]] = {}
        weakref.finalize(self, _report_failures, self._failures, self.report)
        remove_leftovers(self.folder)

    def save(
        self,
        step: int,
        tree: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a tree of arrays as this step. Returns after the copy to the host, and after the save before it.

        What goes wrong on the disk is given by `failure` or `wait`. A step that is there is saved anew.
        """
        number = validate_step(step)
        values, words = validate_metrics(metrics or {}), validate_notes(notes or {})
        leaves, _ = flatten_with_names(tree)
        self._join()
        if failure := self.failure():
            self.report(f"the save before this one failed, with {type(failure).__name__}: {failure}")
        group = self._together(leaves)
        self._saves += 1
        copies = copy_to_host(leaves, group)
        save = SaveJob(self.folder, number, copies, values, words, group, self._saves, self.file_bytes, self.patience)
        self._running = self._writer.submit(self._carry_out, save)

    def wait(self) -> None:
        """Until all is on the disk. Raises the failure of the last save, unless it was raised or shown already."""
        self._join()
        if failure := self.failure():
            raise failure

    def failure(self) -> BaseException | None:
        """The failure of the last save, if it has failed; once."""
        return self._failures.pop() if self._failures else None

    def steps(self) -> tuple[int, ...]:
        """The steps that are saved, ascending."""
        return tuple(sorted({found.step for found in step_folders(self.folder) if found.whole}))

    def latest(self) -> int | None:
        """The last of the steps."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step that is best by the metric that was given."""
        if self.by is None:
            raise ValueError("best: Checkpoints has no metric; pass best=Maximize('accuracy') or Minimize('loss').")
        found = {folder.step: folder for folder in step_folders(self.folder)}
        self._metrics = {folder: self._metrics.get(folder) or _read_metrics(folder) for folder in found.values()}
        return self.by.of({folder.step: metrics for folder, metrics in self._metrics.items()})

    def restore(
        self,
        target: Any,
        *,
        step: int | None = None,
        only: tuple[str, ...] = ("**",),
        names: Mapping[str, str] | None = None,
    ) -> RestoredCheckpoint:
        """The tree of a step, like `target` in structure, shapes, dtypes and placement: of the newest that verifies.

        Leaves of `target` are arrays or ShapeDtypeStructs; one without a sharding lets the array be anywhere, and an
        array of NumPy keeps it on the host. `only` are patterns of the leaves to restore: the others are not read, and
        come back as they are in `target`, ShapeDtypeStructs too. `names` gives {saved: wanted} paths, of leaves or of
        branches.
        """
        self._join()
        leaves, structure = flatten_with_names(target)
        group = self._together(leaves)
        refused: list[tuple[int, str]] = []
        for folder in self._candidates(step, group):
            outcome = _try_restore(folder, leaves, structure, only, names or {})
            well = all_processes_ok(not isinstance(outcome, Exception), group.count)
            if well and not isinstance(outcome, Exception):
                return outcome._replace(refused=tuple(refused))
            if isinstance(outcome, Exception) and not isinstance(outcome, InvalidFile):
                raise outcome
            why = str(outcome) if isinstance(outcome, InvalidFile) else f"{folder.path}: damaged in another process."
            if step is not None:
                raise InvalidFile(why)
            refused.append((folder.step, why))
            self.report(f"step {folder.step} is passed over. {why}")
        if refused:
            raise InvalidFile(f"{self.folder}: no step is whole. " + " ".join(why for _, why in refused))
        raise FileNotFoundError(f"{self.folder}: there is no step{'' if step is None else f' {step}'} to restore.")

    def _candidates(self, step: int | None, group: ProcessGroup) -> list[StepFolder]:
        """The folders to try, the newest first; the same in all processes."""
        found = [folder for folder in step_folders(self.folder) if step is None or folder.step == step]
        names = broadcast_text(json.dumps([os.path.basename(folder.path) for folder in found[-200:]]), group.count)
        chosen = set(json.loads(names))
        return [folder for folder in reversed(step_folders(self.folder)) if os.path.basename(folder.path) in chosen]

    def _together(self, leaves: Mapping[str, Any]) -> ProcessGroup:
        """The processes that hold the leaves; several of them agree only once."""
        group = self._group or process_group(leaves.values())
        self._group = group if group.count > 1 else None
        return group

    def _carry_out(self, save: SaveJob) -> None:
        failure = self._tried(save)
        if failure is not None:
            failure.add_note("In the thread that saves:\n" + "".join(traceback.format_tb(failure.__traceback__)))
            for each in (failure, failure.__cause__, failure.__context__):  # frames would keep the copies alive
                if each is not None:
                    each.__traceback__ = None
            self._failures.append(failure)

    def _tried(self, save: SaveJob) -> BaseException | None:
        try:
            write_checkpoint(save)
            if save.group.index == 0:
                best = self.best() if self.by is not None else None
                apply_retention(self.folder, self.keep, {save.step} if best is None else {save.step, best}, save.id)
        except BaseException as failure:  # whatever it is, it is for the thread that asked
            return failure
        return None

    def _join(self) -> None:
        if self._running is not None:
            self._running.result()
            self._running = None


def _try_restore(
    folder: StepFolder, leaves: Mapping[str, Any], structure: Any, only: tuple[str, ...], names: Mapping[str, str]
) -> RestoredCheckpoint | Exception:
    try:
        reading = StepReader(folder)
        manifest = reading.manifest
        saved = match_leaves(manifest.arrays, leaves, only, names)
        values = [
            restore_leaf(reading, saved[name], name, leaf) if name in saved else leaf for name, leaf in leaves.items()
        ]
        return RestoredCheckpoint(manifest.step, structure.unflatten(values), manifest.metrics, manifest.notes)
    except Exception as failure:
        return failure


def _read_metrics(folder: StepFolder) -> Mapping[str, float]:
    try:
        return read_manifest(os.path.join(folder.path, MANIFEST)).metrics
    except InvalidFile:
        return {}


def _print_report(words: str) -> None:
    print(f"mlax.train.Checkpoints: {words}", file=sys.stderr)


def _report_failures(failures: list[BaseException], report: Callable[[str], None]) -> None:
    for failure in failures:
        report(f"the last save failed, and nobody looked: {failure}")


def validate_step(step: Any) -> int:
    """The step as an int."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:  # an array has an index too, but only one of a single int can give it
        number = -1
    if not 0 <= number < 10**18:
        words = "a whole number is wanted; write save(int(state.step), state)"
        raise ValueError(f"save: the step is {_describe_value(step)}, but {words}.")
    return number


def validate_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics as floats."""
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError) as failure:
        raise TypeError(f"save: metrics are single numbers by name ({failure}); put anything else in notes.") from None


def validate_notes(notes: Mapping[str, Any]) -> Any:
    """The notes as JSON gives them back."""
    try:
        return json.loads(json.dumps(dict(notes), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as failure:
        raise TypeError(f"save: notes are what JSON can hold ({failure}); save arrays in the tree.") from None


def validate_best(best: Any) -> None:
    """Refuse what does not say which step is the best: a name alone leaves open whether high or low is good."""
    if not isinstance(best, Maximize | Minimize | None):
        name = best if isinstance(best, str) else "loss"
        wanted = f"best=train.Minimize({name!r}) or best=train.Maximize({name!r})"
        raise TypeError(f"Checkpoints: best is {_describe_value(best)}, but is to say what is good; pass {wanted}.")


def _describe_value(given: Any) -> str:
    """What came, in short: a whole state would fill the screen."""
    words = repr(given) if np.isscalar(given) else signature(given)
    return words if len(words) <= 60 else f"a {type(given).__name__}"
