"""NoSpace: a file system is full, or would be."""

import contextlib
import errno
import os
from collections.abc import Iterator

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class NoSpace(OSError):
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
def room_for(path: str, needed: int) -> Iterator[None]:
    """Refuse to start where `needed` bytes are not free; give an ENOSPC on the way the same words."""
    if needed > (free := free_bytes(path)):
        raise NoSpace(path, needed, free)
    try:
        yield
    except NoSpace:
        raise
    except OSError as failure:
        if failure.errno not in _FULL:
            raise
        raise NoSpace(failure.filename or path, needed, free_bytes(path)) from failure
