"""The folders of a checkpoint directory: one for each step, retention, and leftovers of interrupted saves."""

import os
import re
import shutil
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple

from mlax.files import fsync_folder
from mlax.train.checkpoints._multiprocess import process_start_time

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8,18})(?:-(\d{1,9}))?")
_LEFTOVER = re.compile(
    r"\.(?:saving|removing|failed)-\d+-(?P<host>.+)-(?P<pid>\d+)-(?P<began>\d+)-[0-9a-f]{8}(?:-\d+)+"
)
_ONE_DAY = 24 * 60 * 60


class StepFolder(NamedTuple):
    """Where a step lies. `again` counts the folders of one step: 1, then 2 if it was saved once more."""

    step: int
    again: int
    path: str

    @property
    def whole(self) -> bool:
        """Whether it has a manifest, without which a step does not count."""
        return os.path.isfile(os.path.join(self.path, MANIFEST))


def step_folders(folder: str) -> list[StepFolder]:
    """The steps that there are, by number, and of one step the one saved last last. Links are not looked at."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    hits = [(match, name) for name in names if (match := _STEP.fullmatch(name))]
    return sorted(StepFolder(int(match[1]), int(match[2] or 1), os.path.join(folder, name)) for match, name in hits)


def new_step_path(folder: str, step: int) -> str:
    """Where a save of this step goes: beside an older one of the same step, which stays until this one is there."""
    again = max((found.again for found in step_folders(folder) if found.step == step), default=0) + 1
    return os.path.join(folder, f"step-{step:08d}" if again == 1 else f"step-{step:08d}-{again}")


def remove_leftovers(folder: str) -> None:
    """Delete what dead processes have left; never what a living one is busy with."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    for name in names:
        path = os.path.join(folder, name)
        if (match := _LEFTOVER.fullmatch(name)) and _is_abandoned(match, path):
            remove_path(path)


def remove_path(path: str) -> None:
    """Delete a folder or a file as far as that is possible; what stays is remains."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


def _is_abandoned(match: re.Match[str], path: str) -> bool:
    if match["host"] == socket.gethostname()[:60]:
        return process_start_time(int(match["pid"])) != int(match["began"])
    try:
        return time.time() - os.stat(path).st_mtime > _ONE_DAY  # of another host nothing else is known
    except FileNotFoundError:
        return False


def apply_retention(folder: str, keep: int | None, also: Iterable[int], id: str) -> None:
    """Keep the last `keep` steps and those in `also`, and of each step the last save.

    A folder is renamed away before anything in it is deleted, so that a kill at any moment leaves whole steps.
    """
    found = step_folders(folder)
    newest = {each.step: each for each in found if each.whole}  # of one step the last save comes last
    kept = set(newest) if keep is None else {*sorted(newest)[-keep:], *also}
    leaving = [each for each in found if each.step not in kept or newest.get(each.step, each) != each]
    gone: list[str] = []
    for number, each in enumerate(leaving):
        gone.append(os.path.join(folder, f".removing-{each.step:08d}-{id}-{number}"))
        remove_path(gone[-1])  # a save before this one may have been kept from deleting it
        os.rename(each.path, gone[-1])
    if gone:
        fsync_folder(folder)
    for path in gone:
        remove_path(path)
