"""Open a file for reading: a regular one, that lies where it is said to lie."""

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from mlax.files._refused import Refused

# Not blocking: to open a fifo would wait for someone to write into it.
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device"}


@contextlib.contextmanager
def opened(path: str, within: str | None = None) -> Iterator[tuple[BinaryIO, int]]:
    """The file, and its size. A link is followed only to a place within `within`, by default the file's own folder."""
    real, home = os.path.realpath(path), os.path.realpath(within or os.path.dirname(os.path.abspath(path)))
    if os.path.commonpath([real, home]) != home:
        raise Refused(f"{path}: it is a link that leads out of {home}, to {real}; pass that path if you trust it.")
    descriptor = os.open(real, _FLAGS)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise Refused(f"{path}: it is {_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}, not a file.")
    with open(descriptor, "rb") as file:
        yield file, found.st_size
