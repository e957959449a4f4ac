"""Open and parse untrusted files safely, and write files crash-safely: fsync, rename, fsync the directory."""

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


class InvalidFile(ValueError):
    """A file is damaged, is no file of arrays, or asks for what no honest file asks; the words name it and say why."""


# Not blocking: to open a fifo would wait for someone to write into it.
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_FILE_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device"}


@contextlib.contextmanager
def safe_open(path: str, within: str | None = None) -> Iterator[tuple[BinaryIO, int]]:
    """The file, and its size. A link is followed only to a place within `within`, by default the file's own folder."""
    real, home = os.path.realpath(path), os.path.realpath(within or os.path.dirname(os.path.abspath(path)))
    if os.path.commonpath([real, home]) != home:
        raise InvalidFile(f"{path}: it is a link that leads out of {home}, to {real}; pass that path if you trust it.")
    descriptor = os.open(real, _READ_FLAGS)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise InvalidFile(f"{path}: it is {_FILE_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}, not a file.")
    with open(descriptor, "rb") as file:
        yield file, found.st_size


# A string, closed or not; possessive, so that no input makes it look at anything twice.
_JSON_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def parse_json(data: bytes, path: str, *, depth: int) -> dict[str, Any]:
    """The object that `data` holds, of no more than `depth` brackets inside one another; `path` is for the words."""
    brackets = np.frombuffer(_JSON_STRING.sub(b"", data).translate(None, _NO_BRACKETS), np.uint8)
    if np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1).cumsum().max(initial=0) > depth:
        raise InvalidFile(f"{path}: its JSON is nested more than {depth} deep; nothing honest is.")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique_keys, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as failure:
        raise InvalidFile(f"{path}: its JSON cannot be read ({failure}).") from None
    if not isinstance(value, dict):
        raise InvalidFile(f"{path}: its JSON is a {type(value).__name__}, but an object is wanted.")
    return value


def is_count(value: Any, most: int = 2**63 - 1) -> bool:
    """Whether a value of JSON is a whole number from 0 to `most`; True is none."""
    return type(value) is int and 0 <= value <= most


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice[:100]!r} is there twice")
    return found


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_WRITE_BYTES = 1 << 26  # bytes a call: a kernel takes no more than 2 GiB, and others shall come to their turn


def write_synced(path: str, parts: Iterable[bytes | memoryview]) -> None:
    """A new file of these parts, synced. What there is of it stays if that fails: the caller cleans up."""
    file = os.open(path, _CREATE_FLAGS, 0o666)
    try:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[os.write(file, view[:_WRITE_BYTES]) :]
        os.fsync(file)
    except OSError as failure:
        failure.filename = failure.filename or path
        raise
    finally:
        os.close(file)


def atomic_write(path: str, parts: Iterable[bytes | memoryview]) -> None:
    """The file with this content: the old one until all is there, then the new one. Nothing else is left over."""
    folder, name = os.path.split(os.path.abspath(path))
    with remove_on_error(os.path.join(folder, f".{name[:100]}.{secrets.token_hex(8)}")) as temporary:
        write_synced(temporary, parts)
        os.replace(temporary, path)
    fsync_folder(folder)


def make_folder(path: str) -> None:
    """The folder, and those above it that are not there; each synced into the one that holds it."""
    path = os.path.abspath(path)
    if os.path.isdir(path):
        return
    make_folder(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):  # another process may be faster
        os.mkdir(path)
    fsync_folder(os.path.dirname(path))


def fsync_folder(folder: str) -> None:
    """Until the names in the folder are on the disk."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # where folders cannot be opened, they cannot be synced
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    except OSError as failure:
        failure.filename = failure.filename or folder
        raise
    finally:
        os.close(file)


@contextlib.contextmanager
def remove_on_error(path: str) -> Iterator[str]:
    """The path of a file that is deleted again if the body fails."""
    try:
        yield path
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


_NO_SPACE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class NotEnoughSpace(OSError):
    """There is no room for what was to be written: `filename`, and the bytes `needed` and `free`."""

    def __init__(self, path: str, needed: int, free: int):
        words = f"no space: this needs {needed:,} bytes and {free:,} are free; delete something, or write elsewhere"
        if free >= needed:
            words += " (the limit may be a quota, or one on the number of files)"
        super().__init__(errno.ENOSPC, words, path)
        self.needed, self.free = needed, free


def free_bytes(path: str) -> int:
    """The bytes that may still be written where `path` is, or will be."""
    while not os.path.isdir(path):
        path = os.path.dirname(os.path.abspath(path))
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


@contextlib.contextmanager
def require_space(path: str, needed: int) -> Iterator[None]:
    """Refuse to start where `needed` bytes are not free; give an ENOSPC on the way the same words."""
    if needed > (free := free_bytes(path)):
        raise NotEnoughSpace(path, needed, free)
    try:
        yield
    except NotEnoughSpace:
        raise
    except OSError as failure:
        if failure.errno not in _NO_SPACE_ERRNOS:
            raise
        raise NotEnoughSpace(failure.filename or path, needed, free_bytes(path)) from failure
