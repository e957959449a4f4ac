"""Writing so that it is there: synced before it has its name, and the name synced too."""

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_AT_ONCE = 1 << 26  # bytes a call: a kernel takes no more than 2 GiB, and others shall come to their turn


def write(path: str, parts: Iterable[bytes | memoryview]) -> None:
    """A new file of these parts, synced. What there is of it stays if that fails: the caller cleans up."""
    file = os.open(path, _FLAGS, 0o666)
    try:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[os.write(file, view[:_AT_ONCE]) :]
        os.fsync(file)
    except OSError as failure:
        failure.filename = failure.filename or path
        raise
    finally:
        os.close(file)


def replace(path: str, parts: Iterable[bytes | memoryview]) -> None:
    """The file with this content: the old one until all is there, then the new one. Nothing else is left over."""
    folder, name = os.path.split(os.path.abspath(path))
    with gone_on_failure(os.path.join(folder, f".{name[:100]}.{secrets.token_hex(8)}")) as temporary:
        write(temporary, parts)
        os.replace(temporary, path)
    sync_folder(folder)


def make_folder(path: str) -> None:
    """The folder, and those above it that are not there; each synced into the one that holds it."""
    path = os.path.abspath(path)
    if os.path.isdir(path):
        return
    make_folder(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):  # another process may be faster
        os.mkdir(path)
    sync_folder(os.path.dirname(path))


def sync_folder(folder: str) -> None:
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
def gone_on_failure(path: str) -> Iterator[str]:
    """The path of a file that is deleted again if the body fails."""
    try:
        yield path
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
