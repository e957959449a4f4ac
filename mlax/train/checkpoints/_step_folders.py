"""The folders of a checkpoint directory: one for each step, retention, and leftovers of interrupted saves."""

import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple

from mlax._supervision import STEP_FOLDER
from mlax.files import fsync_folder

MANIFEST = "manifest.json"
_TEMPORARY = re.compile(
    r"\.(?:saving|removing|failed)-\d+-(?P<host>.+)-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}(?:-\d+)+"
)
_ONE_DAY = 24 * 60 * 60


class StepFolder(NamedTuple):
    """The folder of a saved step. `version` is 1, or 2 and up where the same step was saved again."""

    step: int
    version: int
    path: str

    @property
    def has_manifest(self) -> bool:
        """Whether the folder has a manifest; one without is not a checkpoint."""
        return os.path.isfile(os.path.join(self.path, MANIFEST))


def step_folders(folder: str) -> list[StepFolder]:
    """The step folders, sorted by step and version. Symbolic links are ignored."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    matches = [(match, name) for name in names if (match := STEP_FOLDER.fullmatch(name))]
    return sorted(StepFolder(int(match[1]), int(match[2] or 1), os.path.join(folder, name)) for match, name in matches)


def new_step_path(folder: str, step: int) -> str:
    """A free path for a save of `step`. An earlier save of the same step stays until the new one is complete."""
    version = max((found.version for found in step_folders(folder) if found.step == step), default=0) + 1
    return os.path.join(folder, f"step-{step:08d}" if version == 1 else f"step-{step:08d}-{version}")


def temporary_path(folder: str, purpose: str, step: int, save_id: str) -> str:
    """A path for `purpose` (saving, removing, failed) that names the process it belongs to, by the id of its save."""
    return os.path.join(folder, f".{purpose}-{step:08d}-{save_id}")


def apply_retention(folder: str, keep: int | None, also: Iterable[int], save_id: str) -> None:
    """Delete all but the last `keep` steps (None: all) and the steps in `also`; of each step keep the last save.

    Each folder is renamed before its contents are deleted, so that a crash at any moment leaves complete steps only.
    """
    found = step_folders(folder)
    newest = {each.step: each for each in found if each.has_manifest}  # sorted: the last version wins
    kept = set(newest) if keep is None else {*sorted(newest)[-keep:], *also}
    expired = [each for each in found if each.step not in kept or newest.get(each.step, each) != each]
    renamed: list[str] = []
    for number, each in enumerate(expired):
        renamed.append(temporary_path(folder, "removing", each.step, f"{save_id}-{number}"))
        remove_path(renamed[-1])  # an earlier deletion may have failed halfway
        os.rename(each.path, renamed[-1])
    if renamed:
        fsync_folder(folder)
    for path in renamed:
        remove_path(path)


def remove_leftovers(folder: str) -> None:
    """Delete the temporary files and folders of processes that have died, but not those of running ones."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    for name in names:
        path = os.path.join(folder, name)
        if (match := _TEMPORARY.fullmatch(name)) and _has_died(match, path):
            remove_path(path)


def remove_path(path: str) -> None:
    """Delete a file, or as much of a folder as possible; `remove_leftovers` deletes the rest later."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


def _has_died(match: re.Match[str], path: str) -> bool:
    if match["host"] == socket.gethostname()[:60]:
        return _start_time(int(match["pid"])) != int(match["start"])
    try:
        return time.time() - os.stat(path).st_mtime > _ONE_DAY  # a process of another host: age is all that is known
    except FileNotFoundError:
        return False


def unique_process_id() -> str:
    """A unique name of this process: host, process id, start time and a random suffix."""
    pid = os.getpid()
    return f"{socket.gethostname()[:60]}-{pid}-{_start_time(pid) or 0}-{secrets.token_hex(4)}"


def _start_time(pid: int) -> int | None:
    """When a process of this host started, in clock ticks since boot; 0 if unknown, None if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        pass
    if os.path.exists("/proc/self/stat"):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0
