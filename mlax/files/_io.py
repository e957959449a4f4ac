"""Read untrusted files safely, and write files crash-safely: fsync, rename, fsync the directory."""

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np

from mlax.core import Documented

# Non-blocking: opening a FIFO would otherwise wait for the other end.
_SAFE_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_WRITE_BYTES = 1 << 26  # per call: the kernel writes at most 2 GiB, and other threads should get their turn
_FILE_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_NOT_REGULAR_ERRNOS = {errno.ELOOP, errno.ENXIO, errno.EISDIR}  # of opening a link, a FIFO or a socket, a folder
NO_LOCKS_ERRNOS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
_NO_SPACE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

# A string, terminated or not; possessive quantifiers, so that no input makes it backtrack.
_JSON_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_UNFINISHED = re.compile(r"\..{1,100}\.[0-9a-f]{16}")  # the temporary names of `atomic_write`
_Path = str | os.PathLike[str]
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class InvalidFile(ValueError, metaclass=Documented):
    """A file is damaged, has another format or exceeds a limit; the message names the file and the reason."""


class NotEnoughSpace(OSError, metaclass=Documented):
    """A file system is too full to write `filename`: that takes `needed` bytes, and `free` are left."""

    def __init__(self, path: str, needed: int, free: int):
        message = (
            f"not enough space: this needs {needed:,} bytes and {free:,} are free; delete files or write elsewhere"
        )
        if free >= needed:
            message += " (the limit may be a quota, or the number of files)"
        super().__init__(errno.ENOSPC, message, path)
        self.needed, self.free = needed, free


@contextlib.contextmanager
def safe_open(path: str, within: _Path | None = None, folder: _Path | None = None) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file for reading: yields the file and its size.

    A symbolic link must lead to a file inside `folder`, by default that of the link, or inside `within`. For a path
    with parts that are not the caller's, pass `folder`: they may be links, too.
    """
    homes = [os.path.realpath(folder or os.path.dirname(os.path.abspath(path)))]
    homes += [os.path.realpath(within)] if within else []
    real = os.path.realpath(path)
    if all(os.path.commonpath([real, home]) != home for home in homes):
        raise InvalidFile(
            f"{path}: it is a link that leads out of {' and '.join(dict.fromkeys(homes))}, to {real}; if you trust it, "
            f"pass that path, or within={os.path.dirname(real)!r}."
        )
    with open(open_regular(real, os.O_RDONLY, name=path), "rb") as file:
        yield file, os.fstat(file.fileno()).st_size


def open_regular(path: str, flags: int, *, name: str | None = None) -> int:
    """Open a regular file as `os.open` does; links, FIFOs, devices and folders raise InvalidFile, which says `name`."""
    name = name or path
    try:
        descriptor = os.open(path, flags | _SAFE_FLAGS, 0o666)
    except OSError as error:
        if error.errno in _NOT_REGULAR_ERRNOS and os.path.lexists(path):
            raise InvalidFile(f"{name}: it is {_file_kind(os.lstat(path))}, not a regular file.") from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise InvalidFile(f"{name}: it is {_file_kind(status)}, not a regular file.")
    return descriptor


def _file_kind(status: os.stat_result) -> str:
    return _FILE_KINDS.get(stat.S_IFMT(status.st_mode), "something else")


def lock_file(path: str) -> int | None:
    """Lock a file, created if missing: its descriptor, for `unlock_file`, or None if it is locked already.

    A file system without locks raises OSError, one of `NO_LOCKS_ERRNOS`.
    """
    import fcntl  # only Unix has it

    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        with _name_in_errors(path):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


def parse_json(data: bytes, path: str, *, depth: int, items: int = 1 << 20) -> dict[str, Any]:
    """Parse an untrusted JSON object: at most `depth` levels and `items` values, no duplicate keys, no NaN.

    `path` is for errors.
    """
    strings = (data.count(b'"') - data.count(b'\\"')) // 2  # at least half of them: each `sub` finds takes 100 bytes
    structure = _JSON_STRING.sub(b"", data) if strings <= items else b""
    if (count := max(strings, structure.count(b",") + 1)) > items:
        raise InvalidFile(f"{path}: its JSON has {count:,} values, and at most {items:,} are allowed.")
    brackets = np.frombuffer(structure.translate(None, _NO_BRACKETS), np.uint8)
    if np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1).cumsum().max(initial=0) > depth:
        raise InvalidFile(f"{path}: its JSON is nested more than {depth} levels deep.")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique_keys, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidFile(f"{path}: its JSON cannot be parsed ({error}).") from None
    if not isinstance(value, dict):
        raise InvalidFile(f"{path}: its JSON is a {type(value).__name__}, not an object.")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        duplicate = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"duplicate key {duplicate[:100]!r}")
    return value


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def is_count(value: Any, most: int = 2**63 - 1) -> bool:
    """Whether a JSON value is an integer from 0 to `most`; booleans are not."""
    return type(value) is int and 0 <= value <= most


def atomic_write(path: str, parts: Iterable[bytes | memoryview]) -> None:
    """Write or replace a file. After a crash at any moment, `path` is the old file or the complete new one."""
    folder, name = os.path.split(os.path.abspath(path))
    with remove_on_error(os.path.join(folder, f".{name[:100]}.{secrets.token_hex(8)}")) as temporary:
        write_synced(temporary, parts)
        os.replace(temporary, path)
    fsync_folder(folder)


def remove_unfinished(folder: str) -> None:
    """Delete the files that calls of `atomic_write` have left in a folder because the process was killed.

    Only for one who knows that no other process writes there, by holding a lock.
    """
    with os.scandir(folder) as entries:
        found = [entry.path for entry in entries if _UNFINISHED.fullmatch(entry.name)]
    for path in found:
        with contextlib.suppress(OSError):  # they only take space
            os.unlink(path)


def write_synced(path: str, parts: Iterable[bytes | memoryview]) -> None:
    """Write a new file and fsync it. If that fails, the caller removes the incomplete file."""
    file = os.open(path, _CREATE_FLAGS, 0o666)
    with _name_in_errors(path):
        try:
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[os.write(file, view[:_WRITE_BYTES]) :]
            os.fsync(file)
        finally:
            os.close(file)


def make_folder(path: str) -> None:
    """Create a folder and its missing parents, and fsync the parent of each."""
    path = os.path.abspath(path)
    if os.path.isdir(path):
        return
    make_folder(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):  # another process may have created it meanwhile
        os.mkdir(path)
    fsync_folder(os.path.dirname(path))


def fsync_folder(folder: str) -> None:
    """Flush the names in a folder to disk: without it, a crash may undo a rename."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # a platform on which folders cannot be opened
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with _name_in_errors(folder):
        try:
            os.fsync(file)
        finally:
            os.close(file)


@contextlib.contextmanager
def _name_in_errors(path: str) -> Iterator[None]:
    """Add the path to errors of calls that take a descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path
        raise


def unlock_file(descriptor: int) -> None:
    """Undo `lock_file`. Closing does not suffice: a process that was forked meanwhile has a copy of the descriptor."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def remove_on_error(path: str) -> Iterator[str]:
    """Remove the file at `path` if the body raises."""
    try:
        yield path
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


@contextlib.contextmanager
def require_space(path: str, needed: int) -> Iterator[None]:
    """Raise NotEnoughSpace if `needed` bytes are not free, or if the body runs out of space."""
    check_space(path, needed)
    with translate_no_space(path, needed):
        yield


def check_space(path: str, needed: int) -> None:
    """Raise NotEnoughSpace if `needed` bytes are not free."""
    if needed > (free := free_disk_bytes(path)):
        raise NotEnoughSpace(path, needed, free)


@contextlib.contextmanager
def translate_no_space(path: str, needed: int) -> Iterator[None]:
    """Raise NotEnoughSpace if the body, which needs `needed` bytes, runs out of space."""
    try:
        yield
    except NotEnoughSpace:
        raise
    except OSError as error:
        if error.errno not in _NO_SPACE_ERRNOS:
            raise
        raise NotEnoughSpace(error.filename or path, needed, free_disk_bytes(path)) from error


def free_disk_bytes(path: str) -> int:
    """The bytes available to this user on the file system of `path`, which need not exist yet."""
    while not os.path.isdir(path):
        path = os.path.dirname(os.path.abspath(path))
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
