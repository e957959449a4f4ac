"""Checkpoints: saved training steps in a folder; atomic, asynchronous, verified."""

import json
import math
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from mlax.core import Documented, check_not_donated, frozen, signature
from mlax.files import InvalidFile, parse_json
from mlax.train._checks import int_or_none
from mlax.train._state import DONATED_STATE
from mlax.train.checkpoints._manifest import MAX_MANIFEST_DEPTH, flatten_with_names, read_manifest
from mlax.train.checkpoints._multiprocess import ProcessGroup, all_succeeded, broadcast_text, process_group
from mlax.train.checkpoints._restore import RestoredCheckpoint, restore_step
from mlax.train.checkpoints._save import SaveJob, copy_to_host, write_checkpoint
from mlax.train.checkpoints._step_folders import (
    MANIFEST,
    StepFolder,
    apply_retention,
    parse_step_folders,
    step_folders,
    writer_lock,
)

_MAX_NOTES_BYTES, _MAX_NOTES_ITEMS = 1 << 25, 1 << 20
_MAX_CANDIDATES = 200  # to restore from
_MAX_LISTINGS = 20  # by a reader, while a writer keeps deleting what it has listed


@frozen
class Maximize(metaclass=Documented):
    """The best step has the highest `metric`, the latest of equal ones. Steps without it, or with NaN, do not count."""

    metric: str  # the name of the score

    def best_step(self, metrics: Mapping[int, Mapping[str, float]]) -> int | None:
        """The best step, given the metrics of each."""
        return _best_step(metrics, self.metric, 1.0)


@frozen
class Minimize(metaclass=Documented):
    """The best step has the lowest `metric`, the latest of equal ones. Steps without it, or with NaN, do not count."""

    metric: str  # the name of the score

    def best_step(self, metrics: Mapping[int, Mapping[str, float]]) -> int | None:
        """The best step, given the metrics of each."""
        return _best_step(metrics, self.metric, -1.0)


def _best_step(metrics: Mapping[int, Mapping[str, float]], name: str, sign: float) -> int | None:
    values = {step: sign * each[name] for step, each in metrics.items() if not math.isnan(each.get(name, math.nan))}
    return max(values, key=lambda step: (values[step], step), default=None)


class Checkpoints(metaclass=Documented):
    """The checkpoints in a folder: the last `keep` steps (None: all), and the best one by a metric.

    `save` returns once the values are copied to the host. A background thread writes them to safetensors files with a
    manifest of hashes, fsyncs everything, and then renames the folder: only then does the step count as saved.
    `restore` returns the newest step whose hashes match. Several processes save into one shared folder.

    Reading changes nothing, so any process may read while another saves. Saves lock the folder: they take turns, and
    the first of them deletes what an interrupted save has left behind.

    report   callback for warnings: an earlier save failed and neither `failure` nor `wait` returned its error, or
             `restore` skipped a damaged step. None prints to stderr.
    timeout  seconds that a save waits for other processes
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        best: Maximize | Minimize | None = None,
        report: Callable[[str], None] | None = None,
        file_bytes: int = 1 << 30,
        timeout: float = 600.0,
    ):
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"Checkpoints: keep is {keep!r}, but must be a number of steps, 1 or more, or None.")
        _check_best(best)
        self.folder = os.path.abspath(os.fspath(folder))
        self.keep, self.criterion = keep, best
        self.report = report or _print_report
        self.file_bytes, self.timeout = file_bytes, timeout
        # Starting a thread hands it the GIL for 5 ms, so this one is ready before `save` needs it.
        self._writer = ThreadPoolExecutor(1, "mlax-checkpoints")
        self._running: Future[None] | None = None
        self._failures: list[BaseException] = []
        self._group: ProcessGroup | None = None
        self._saves = 0
        self._metrics: dict[StepFolder, Mapping[str, float] | None] = {}
        self._damaged: set[str] = set()  # paths of steps that `restore` has skipped
        weakref.finalize(self, _report_failures, self._failures, self.report)

    def __repr__(self) -> str:
        best = "" if self.criterion is None else f", best={self.criterion!r}"
        return f"Checkpoints({self.folder!r}, keep={self.keep}{best})"

    def save(
        self,
        step: int,
        tree: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        notes: Mapping[str, Any] | None = None,
        also_keep: Collection[int] = (),
    ) -> None:
        """Save a pytree of arrays as this step. Waits for the previous save, and returns after the copy to the host.

        Disk errors surface in `failure` or `wait`. Saving a step again replaces it. `also_keep` are older steps that
        this save does not delete.
        """
        step, metrics, notes = _check_step(step), _check_metrics(metrics or {}), _check_notes(notes or {})
        check_not_donated("Checkpoints.save", DONATED_STATE, tree=tree)
        leaves, _ = flatten_with_names(tree)
        self._join()
        if failure := self.failure():
            self.report(f"the previous save failed with {type(failure).__name__}: {failure}")
        group = self._process_group(leaves)
        self._saves += 1
        copies = copy_to_host(leaves, group)
        job = SaveJob(self.folder, step, copies, metrics, notes, group, self._saves, self.file_bytes, self.timeout)
        self._running = self._writer.submit(self._write, job, frozenset(also_keep))

    def has(self, step: int) -> bool:
        """Whether a step is saved. Waits for the last save."""
        self._join()
        return step in self.steps()

    def wait(self) -> None:
        """Wait until the last save is on disk. Raises its failure, unless that was raised or reported before."""
        self._join()
        if failure := self.failure():
            raise failure

    def failure(self) -> BaseException | None:
        """The failure of the last save, if it has failed; only once."""
        return self._failures.pop() if self._failures else None

    def steps(self) -> tuple[int, ...]:
        """The saved steps, ascending."""
        return tuple(sorted({found.step for found in step_folders(self.folder) if found.fault is None}))

    def latest(self) -> int | None:
        """The last saved step; None if there is none. Steps none of which can be restored raise `InvalidFile`."""
        if steps := self.steps():
            return steps[-1]
        if found := step_folders(self.folder):
            raise InvalidFile(
                f"{self.folder}: none of its steps can be restored ({found[-1].path}: {found[-1].fault}); "
                "repair them, or move them elsewhere to start over."
            )
        return None

    def best(self) -> int | None:
        """The best of the saved steps, by the metric passed as `best`."""
        if self.criterion is None:
            raise ValueError("best: Checkpoints has no metric; pass best=Maximize('accuracy') or Minimize('loss').")
        metrics = self._read_all_metrics()
        return self.criterion.best_step({step: each for step, each in metrics.items() if each is not None})

    def _read_all_metrics(self) -> dict[int, Mapping[str, float] | None]:
        """The metrics of each saved step, None where they cannot be read."""
        found = {folder.step: folder for folder in step_folders(self.folder) if folder.fault is None}
        self._metrics = {folder: self._metrics.get(folder) or _read_metrics(folder) for folder in found.values()}
        return {step: self._metrics[folder] for step, folder in found.items()}

    def restore(
        self,
        target: Any,
        *,
        step: int | None = None,
        only: str | tuple[str, ...] = "**",
        names: Mapping[str, str] | None = None,
    ) -> RestoredCheckpoint:
        """Restore a step, by default the newest that verifies, with the structure, dtypes and shardings of `target`.

        Leaves of `target` are arrays or ShapeDtypeStructs. A leaf without a sharding is left uncommitted; a
        NumPy array stays on the host. `only` are patterns of the leaves to restore; the others are not read, and are
        returned as they are in `target`. `names` maps {saved: wanted} paths, of leaves or of subtrees.
        """
        self._join()
        leaves, treedef = flatten_with_names(target)
        group = self._process_group(leaves)
        skipped: dict[StepFolder, str] = {}
        for _ in range(_MAX_LISTINGS):
            candidates = self._candidates(step, group)
            for folder in candidates:
                outcome = _try_restore(folder, leaves, treedef, only, names or {})
                succeeded = all_succeeded(not isinstance(outcome, Exception), group.count)
                if succeeded and not isinstance(outcome, Exception):
                    return outcome._replace(skipped=tuple((each.step, reason) for each, reason in skipped.items()))
                mistake = outcome if isinstance(outcome, Exception) and not isinstance(outcome, InvalidFile) else None
                if not all_succeeded(mistake is None, group.count):  # all raise, or the others would wait for this one
                    raise mistake or RuntimeError("restore: another process failed; see its output.")
                if all_succeeded(os.path.lexists(folder.path), group.count):
                    if step is None and folder not in skipped:
                        self.report(f"step {folder.step} is skipped. {_reason(folder, outcome)}")
                    skipped[folder] = _reason(folder, outcome)
                    self._damaged.add(folder.path)
            if all_succeeded(all(os.path.lexists(folder.path) for folder in candidates), group.count):
                break  # otherwise a writer has deleted some, after saving newer ones
        if skipped:
            whole = f"{self.folder}: every step is damaged; move them elsewhere to start over. " if step is None else ""
            raise InvalidFile(whole + " ".join(skipped.values()))
        raise FileNotFoundError(f"{self.folder}: there is no step{'' if step is None else f' {step}'} to restore.")

    def _candidates(self, step: int | None, group: ProcessGroup) -> list[StepFolder]:
        """The folders to try, the newest first; the same in all processes."""
        found = [folder for folder in step_folders(self.folder) if step is None or folder.step == step]
        names = json.dumps([os.path.basename(folder.path) for folder in found[-_MAX_CANDIDATES:]])
        return sorted(parse_step_folders(self.folder, json.loads(broadcast_text(names, group.count))), reverse=True)

    def _process_group(self, leaves: Mapping[str, Any]) -> ProcessGroup:
        """The processes that hold the leaves. Several agree on their group by a collective, so it is kept."""
        group = self._group or process_group(leaves.values())
        self._group = group if group.count > 1 else None
        return group

    def _write(self, job: SaveJob, also_keep: frozenset[int]) -> None:
        """On the background thread: write the step, and delete those that retention does not keep."""
        try:
            if (path := write_checkpoint(job)) is not None:
                self._damaged.discard(path)  # if it was deleted and saved again
                self._apply_retention(job, also_keep)
        except BaseException as failure:  # raised later, in the thread that called `save`
            failure.add_note("In the background thread:\n" + "".join(traceback.format_tb(failure.__traceback__)))
            for each in (failure, failure.__cause__, failure.__context__):  # frames would keep the host copies alive
                if each is not None:
                    each.__traceback__ = None
            self._failures.append(failure)

    def _apply_retention(self, job: SaveJob, also_keep: frozenset[int]) -> None:
        try:
            with writer_lock(self.folder, self.timeout):
                kept = {*also_keep, *(self._maybe_best() if self.criterion is not None else ())}
                apply_retention(self.folder, job.step, self.keep, kept, self._damaged)
        except OSError as error:
            reason = f"step {job.step} is saved, but older ones could not be deleted: {error.strerror or error}"
            raise OSError(error.errno, reason, error.filename or self.folder) from error

    def _maybe_best(self) -> set[int | None]:
        """The best step, and those that may be it, since their metrics cannot be read."""
        return {self.best(), *(step for step, metrics in self._read_all_metrics().items() if metrics is None)}

    def _join(self) -> None:
        if self._running is not None:
            self._running.result()
            self._running = None


def _try_restore(folder: StepFolder, *arguments: Any) -> RestoredCheckpoint | Exception:
    """Restore a step, or return the error: all processes must know of it before one raises it."""
    try:
        return restore_step(folder, *arguments)
    except Exception as error:
        return error


def _reason(folder: StepFolder, outcome: Any) -> str:
    return str(outcome) if isinstance(outcome, InvalidFile) else f"{folder.path}: damaged in another process."


def _check_step(step: Any) -> int:
    number = int_or_none(step)
    if number is None or not 0 <= number < 10**18:
        raise ValueError(
            f"save: the step is {_describe_value(step)}, but must be an integer; write save(int(state.step), state)."
        )
    return number


def _check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError) as error:
        raise TypeError(f"save: metrics must be scalars by name ({error}); put anything else in notes.") from None


def _check_notes(notes: Mapping[str, Any]) -> dict[str, Any]:
    """The notes as JSON will return them."""
    try:
        data = json.dumps(dict(notes), allow_nan=False).encode()
        if len(data) > _MAX_NOTES_BYTES:
            raise ValueError(f"they take {len(data):,} bytes, and at most {_MAX_NOTES_BYTES:,} are allowed")
        return parse_json(data, "notes", depth=MAX_MANIFEST_DEPTH - 1, items=_MAX_NOTES_ITEMS)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"save: notes must be JSON-serializable ({error}); save arrays in the tree.") from None


def _check_best(best: Any) -> None:
    if not isinstance(best, Maximize | Minimize | None):
        name = best if isinstance(best, str) else "loss"
        wanted = f"best=train.Minimize({name!r}) or best=train.Maximize({name!r})"
        raise TypeError(f"Checkpoints: best is {_describe_value(best)}, without a direction; pass {wanted}.")


def _describe_value(value: Any) -> str:
    """A short description: a whole train state would fill the screen."""
    text = repr(value) if np.isscalar(value) else signature(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _read_metrics(folder: StepFolder) -> Mapping[str, float] | None:
    try:
        return read_manifest(os.path.join(folder.path, MANIFEST)).metrics
    except InvalidFile:
        return None


def _print_report(message: str) -> None:
    print(f"mlax.train.Checkpoints: {message}", file=sys.stderr)


def _report_failures(failures: list[BaseException], report: Callable[[str], None]) -> None:
    for failure in failures:
        report(f"the last save failed, and nothing checked for it: {failure}")
