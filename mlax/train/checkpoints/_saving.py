"""One save, in the background: everything in a folder of another name, synced, and then the name."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from mlax.files import Refused, make_folder, opened, replace, room_for, sync_folder, write
from mlax.train.checkpoints._manifest import MOST_BYTES, Manifest, decoded, encoded
from mlax.train.checkpoints._merged import merged
from mlax.train.checkpoints._processes import Group
from mlax.train.checkpoints._step_folders import MANIFEST, next_path, remove, step_folders
from mlax.train.checkpoints._taken import Taken
from mlax.train.checkpoints._writing import planned, written


class Save(NamedTuple):
    """What is to be saved, and where to."""

    folder: str
    step: int
    arrays: Mapping[str, Taken]
    metrics: Mapping[str, float]
    notes: Mapping[str, Any]
    group: Group
    number: int  # of this save among those of the group
    most: int  # bytes of a file
    patience: float  # seconds to wait for the other processes

    @property
    def id(self) -> str:
        """The name of the save among all that there ever were."""
        return f"{self.group.id}-{self.number}"

    def beside(self, what: str) -> str:
        """A path for a moment: it tells everyone whose it is."""
        return os.path.join(self.folder, f".{what}-{self.step:08d}-{self.id}")


def carried_out(save: Save) -> None:
    """Write the step; when this returns, it is on the disk. If it raises, there is nothing of it."""
    plan = planned(save.arrays, save.group.index, save.most)
    temporary = save.beside("saving")
    if save.group.index > 0:
        _wait(save, lambda: os.path.isdir(temporary), lambda: os.path.exists(save.beside("failed")), "begin")
    try:
        with room_for(save.folder, plan.needed):
            if save.group.index == 0:
                make_folder(save.folder)
                os.mkdir(temporary)
            files, arrays = written(plan, temporary)
            part = Manifest(save.step, save.id, save.metrics, save.notes, files, arrays)
            if save.group.index > 0:
                replace(os.path.join(temporary, _part(save.group.index)), [encoded(part)])
            else:
                _finish(save, temporary, [part, *_others(save, temporary)])
    except BaseException:
        _give_up(save, temporary)
        raise
    if save.group.index > 0:
        _wait(save, lambda: not os.path.isdir(temporary), lambda: False, "finish")
        if not any(_save_in(found.path) == save.id for found in step_folders(save.folder) if found.step == save.step):
            raise RuntimeError(f"{save.folder}: step {save.step} was given up by the first process; see its output.")


def _finish(save: Save, temporary: str, parts: list[Manifest]) -> None:
    """The first process: put the parts together, and give the folder its name."""
    names, manifest = merged(parts)
    for old, new in names.items():
        os.rename(os.path.join(temporary, old), os.path.join(temporary, new))
    for index in range(1, save.group.count):
        os.unlink(os.path.join(temporary, _part(index)))
    write(os.path.join(temporary, MANIFEST), [encoded(manifest)])
    sync_folder(temporary)
    path = next_path(save.folder, save.step)
    os.rename(temporary, path)
    try:
        sync_folder(save.folder)
    except OSError:
        os.rename(path, temporary)  # a name that may be lost again acknowledges nothing
        raise


def _others(save: Save, temporary: str) -> Iterator[Manifest]:
    for index in range(1, save.group.count):
        path, failed = os.path.join(temporary, _part(index)), os.path.join(temporary, f"failed-{index:05d}")
        _wait(save, partial(os.path.exists, path), partial(os.path.exists, failed), "write", index)
        yield read_manifest(path, whole=False)


def _give_up(save: Save, temporary: str) -> None:
    try:
        if save.group.index == 0:
            remove(temporary)
        if save.group.count > 1:  # tell the others, who would wait in vain
            failed = os.path.join(temporary, f"failed-{save.group.index:05d}")
            write(failed if save.group.index > 0 else save.beside("failed"), [])
    except OSError:
        pass  # the failure that led here is the one to hear of


def read_manifest(path: str, *, whole: bool = True) -> Manifest:
    """The manifest in this file, checked."""
    try:
        with opened(path) as (file, size):
            if size > MOST_BYTES:
                raise Refused(f"{path}: a manifest of {size:,} bytes is refused; {MOST_BYTES:,} are allowed.")
            return decoded(file.read(size), path, whole=whole)
    except OSError as failure:
        raise Refused(f"{path}: it cannot be read ({failure.strerror}).") from None


def _save_in(path: str) -> str | None:
    try:
        return read_manifest(os.path.join(path, MANIFEST)).save
    except Refused:
        return None


def _wait(save: Save, there: Callable[[], bool], failed: Callable[[], bool], verb: str, index: int = 0) -> None:
    """Until something is there; by looking, since a thread in the background must not use collectives."""
    end, pause = time.monotonic() + save.patience, 0.002
    while not there():
        if failed():
            raise RuntimeError(f"{save.folder}: process {index} failed to {verb} step {save.step}; see its output.")
        if time.monotonic() > end:
            raise TimeoutError(
                f"{save.folder}: process {index} did not {verb} step {save.step} within {save.patience:g} seconds."
            )
        time.sleep(pause)
        pause = min(0.1, 1.5 * pause)


def _part(index: int) -> str:
    return f"part-{index:05d}.json"
