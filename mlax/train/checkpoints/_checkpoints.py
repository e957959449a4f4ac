"""Checkpoints: steps of a training in a folder; atomic, in the background, verified."""

import json
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mlax.files import Refused
from mlax.train.checkpoints._best import Highest, Lowest
from mlax.train.checkpoints._given import as_json, check_best, numbers, whole
from mlax.train.checkpoints._matched import matched
from mlax.train.checkpoints._names import named
from mlax.train.checkpoints._placed import placed
from mlax.train.checkpoints._processes import Group, all_well, group_of, told
from mlax.train.checkpoints._reading import Reading
from mlax.train.checkpoints._restored import Restored
from mlax.train.checkpoints._rotation import rotate
from mlax.train.checkpoints._saving import Save, carried_out, read_manifest
from mlax.train.checkpoints._step_folders import MANIFEST, StepFolder, remove_remains, step_folders
from mlax.train.checkpoints._taken import taken


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
        best: Highest | Lowest | None = None,
        report: Callable[[str], None] | None = None,
        file_bytes: int = 1 << 30,
        patience: float = 600.0,
    ):
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"Checkpoints: keep is {keep!r}, but it is how many steps to keep, 1 or more; or None.")
        check_best(best)
        self.folder = os.path.abspath(os.fspath(folder))
        self.keep, self.by = keep, best
        self.report = report or _to_stderr
        self.file_bytes, self.patience = file_bytes, patience
        # A thread that is there already: to start one would hand it the interpreter, for 5 ms, in the middle of `save`.
        self._writer = ThreadPoolExecutor(1, "mlax-checkpoints")
        self._running: Future[None] | None = None
        self._failures: list[BaseException] = []
        self._group: Group | None = None
        self._saves = 0
        self._metrics: dict[StepFolder, Mapping[str, float]] = {}
        weakref.finalize(self, _last_words, self._failures, self.report)
        remove_remains(self.folder)

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
        number = whole(step)
        values, words = numbers(metrics or {}), as_json(notes or {})
        leaves, _ = named(tree)
        self._join()
        if failure := self.failure():
            self.report(f"the save before this one failed, with {type(failure).__name__}: {failure}")
        group = self._together(leaves)
        self._saves += 1
        copies = taken(leaves, group)
        save = Save(self.folder, number, copies, values, words, group, self._saves, self.file_bytes, self.patience)
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
            raise ValueError("best: Checkpoints was given no metric; pass best=Highest('accuracy') or Lowest('loss').")
        found = {folder.step: folder for folder in step_folders(self.folder)}
        self._metrics = {folder: self._metrics.get(folder) or _metrics_in(folder) for folder in found.values()}
        return self.by.of({folder.step: metrics for folder, metrics in self._metrics.items()})

    def restore(
        self,
        target: Any,
        *,
        step: int | None = None,
        only: tuple[str, ...] = ("**",),
        names: Mapping[str, str] | None = None,
    ) -> Restored:
        """The tree of a step, like `target` in structure, shapes, dtypes and placement: of the newest that verifies.

        Leaves of `target` are arrays or ShapeDtypeStructs; one without a sharding lets the array be anywhere, and an
        array of NumPy keeps it on the host. `only` are patterns of the leaves to restore: the others are not read, and
        come back as they are in `target`, ShapeDtypeStructs too. `names` gives {saved: wanted} paths, of leaves or of
        branches.
        """
        self._join()
        leaves, structure = named(target)
        group = self._together(leaves)
        refused: list[tuple[int, str]] = []
        for folder in self._candidates(step, group):
            outcome = _attempt(folder, leaves, structure, only, names or {})
            well = all_well(not isinstance(outcome, Exception), group.count)
            if well and not isinstance(outcome, Exception):
                return outcome._replace(refused=tuple(refused))
            if isinstance(outcome, Exception) and not isinstance(outcome, Refused):
                raise outcome
            why = str(outcome) if isinstance(outcome, Refused) else f"{folder.path}: another process found it damaged."
            if step is not None:
                raise Refused(why)
            refused.append((folder.step, why))
            self.report(f"step {folder.step} is passed over. {why}")
        if refused:
            raise Refused(f"{self.folder}: no step is whole. " + " ".join(why for _, why in refused))
        raise FileNotFoundError(f"{self.folder}: there is no step{'' if step is None else f' {step}'} to restore.")

    def _candidates(self, step: int | None, group: Group) -> list[StepFolder]:
        """The folders to try, the newest first; the same in all processes."""
        found = [folder for folder in step_folders(self.folder) if step is None or folder.step == step]
        names = told(json.dumps([os.path.basename(folder.path) for folder in found[-200:]]), group.count)
        chosen = set(json.loads(names))
        return [folder for folder in reversed(step_folders(self.folder)) if os.path.basename(folder.path) in chosen]

    def _together(self, leaves: Mapping[str, Any]) -> Group:
        """The processes that hold the leaves; several of them agree only once."""
        group = self._group or group_of(leaves.values())
        self._group = group if group.count > 1 else None
        return group

    def _carry_out(self, save: Save) -> None:
        failure = self._tried(save)
        if failure is not None:
            failure.add_note("In the thread that saves:\n" + "".join(traceback.format_tb(failure.__traceback__)))
            for each in (failure, failure.__cause__, failure.__context__):  # frames would keep the copies alive
                if each is not None:
                    each.__traceback__ = None
            self._failures.append(failure)

    def _tried(self, save: Save) -> BaseException | None:
        try:
            carried_out(save)
            if save.group.index == 0:
                best = self.best() if self.by is not None else None
                rotate(self.folder, self.keep, {save.step} if best is None else {save.step, best}, save.id)
        except BaseException as failure:  # whatever it is, it is for the thread that asked
            return failure
        return None

    def _join(self) -> None:
        if self._running is not None:
            self._running.result()
            self._running = None


def _attempt(
    folder: StepFolder, leaves: Mapping[str, Any], structure: Any, only: tuple[str, ...], names: Mapping[str, str]
) -> Restored | Exception:
    try:
        reading = Reading(folder)
        manifest = reading.manifest
        saved = matched(manifest.arrays, leaves, only, names)
        values = [placed(reading, saved[name], name, leaf) if name in saved else leaf for name, leaf in leaves.items()]
        return Restored(manifest.step, structure.unflatten(values), manifest.metrics, manifest.notes)
    except Exception as failure:
        return failure


def _metrics_in(folder: StepFolder) -> Mapping[str, float]:
    try:
        return read_manifest(os.path.join(folder.path, MANIFEST)).metrics
    except Refused:
        return {}


def _to_stderr(words: str) -> None:
    print(f"mlax.train.Checkpoints: {words}", file=sys.stderr)


def _last_words(failures: list[BaseException], report: Callable[[str], None]) -> None:
    for failure in failures:
        report(f"the last save failed, and nobody looked: {failure}")
