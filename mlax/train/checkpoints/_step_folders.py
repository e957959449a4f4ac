"""The folders of a checkpoint directory: one for each step, the lock of its writer, retention, and leftovers."""

import contextlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator
from typing import NamedTuple

from mlax._supervision import STEP_FOLDER
from mlax.files import NO_LOCKS_ERRNOS, fsync_folder, lock_file, unlock_file
from mlax.train.checkpoints._multiprocess import wait_until

MANIFEST = "manifest.json"
LOCK = ".lock"
_TEMPORARY = re.compile(r"\.(?:saving|removing|failed)-\d{8,18}-.+")


class StepFolder(NamedTuple):
    """An entry with the name of a saved step. `version` is 1, or 2 and up where the same step was saved again."""

    step: int
    version: int
    path: str

    @property
    def fault(self) -> str | None:
        """Why this is not a checkpoint, or None if it is: a folder, not a link to one, with a manifest."""
        if os.path.islink(self.path):
            return "it is a symbolic link"
        try:
            mode = os.stat(os.path.join(self.path, MANIFEST), follow_symlinks=False).st_mode
        except OSError as error:
            return f"its {MANIFEST} cannot be read ({error.strerror})"
        return None if stat.S_ISREG(mode) else f"its {MANIFEST} is not a regular file"


def step_folders(folder: str) -> list[StepFolder]:
    """Everything with the name of a step, sorted by step and version, whether or not it is a checkpoint."""
    try:
        return sorted(parse_step_folders(folder, os.listdir(folder)))
    except FileNotFoundError:
        return []


def parse_step_folders(folder: str, names: Collection[str]) -> list[StepFolder]:
    """Those of `names` that are names of steps."""
    matches = [(match, name) for name in names if (match := STEP_FOLDER.fullmatch(name))]
    return [StepFolder(int(match[1]), int(match[2] or 1), os.path.join(folder, name)) for match, name in matches]


def new_step_path(folder: str, step: int) -> str:
    """A free path for a save of `step`. An earlier save of the same step stays until the new one is complete."""
    version = max((found.version for found in step_folders(folder) if found.step == step), default=0) + 1
    return os.path.join(folder, f"step-{step:08d}" if version == 1 else f"step-{step:08d}-{version}")


def temporary_path(folder: str, purpose: str, step: int, save_id: str) -> str:
    """A path for `purpose` (saving, removing, failed) that is unique to a save."""
    return os.path.join(folder, f".{purpose}-{step:08d}-{save_id}")


@contextlib.contextmanager
def writer_lock(folder: str, timeout: float) -> Iterator[bool]:
    """Hold the lock of a checkpoint folder, without which nothing in it is written, renamed or deleted.

    So what has a temporary name belongs to the one who holds the lock, or is a leftover of one who died. Yields False
    where the file system has no locks: saves are safe there too, but nobody can tell what is a leftover.
    """
    path, descriptor = os.path.join(folder, LOCK), None

    def is_locked() -> bool:
        nonlocal descriptor
        descriptor = lock_file(path)
        return descriptor is not None

    try:
        wait_until(is_locked, lambda: False, timeout, f"{path}: another process that saves here", "release it")
    except OSError as error:
        if error.errno is None or error.errno not in NO_LOCKS_ERRNOS:
            raise
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            unlock_file(descriptor)


def apply_retention(
    folder: str, step: int, keep: int | None, also: Collection[int | None], damaged: Collection[str]
) -> None:
    """After saving `step`: delete what is older than the last `keep` steps (None: nothing), except the steps in `also`.

    Of each step the last save is kept. Paths in `damaged` do not count, and what is not a checkpoint is never deleted.
    """
    found = [each for each in step_folders(folder) if each.fault is None]
    newest = {each.step: each for each in found}  # sorted: the last version wins
    counted = [number for number, each in newest.items() if number <= step and each.path not in damaged]
    oldest = 0 if keep is None else counted[-keep:][0]
    expired = [each for each in found if newest[each.step] != each or (each.step < oldest and each.step not in also)]
    renamed: list[str] = []
    for each in expired:  # all are renamed first, so that a crash at any moment leaves complete steps only
        renamed.append(temporary_path(folder, "removing", each.step, f"{each.version}-{secrets.token_hex(8)}"))
        os.rename(each.path, renamed[-1])
    if renamed:
        fsync_folder(folder)
    for path in renamed:
        remove_path(path)


def remove_leftovers(folder: str) -> None:
    """Delete the temporary files and folders of interrupted saves. The caller holds the lock."""
    for name in os.listdir(folder):
        if _TEMPORARY.fullmatch(name):
            remove_path(os.path.join(folder, name))


def remove_path(path: str) -> None:
    """Delete a file, a link, or as much of a folder as possible; `remove_leftovers` deletes the rest later."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)
