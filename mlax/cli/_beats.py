"""Beats in shared memory: a worker writes where it is, its supervisor reads it. Neither ever waits for the other."""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

_FORMAT = struct.Struct("=QQ40s")  # beats so far, step, phase


class Beat(NamedTuple):
    """Where a worker is. All workers beat in the same order, so the least `count` is the one furthest behind."""

    count: int
    step: int
    phase: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}"


class Beats:
    """The last beat of one worker, in a file that both processes have in memory."""

    def __init__(self, path: Path):
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(_FORMAT.size)
            self._memory = mmap.mmap(file.fileno(), _FORMAT.size)
        self._count = 0

    def write(self, step: int, phase: str) -> None:
        """Say where this worker is; to be called by its main thread."""
        self._count += 1
        _FORMAT.pack_into(self._memory, 0, self._count, step, phase.encode()[:40])

    def read(self) -> Beat | None:
        """Where the worker is; None before it has said so."""
        count, step, phase = _FORMAT.unpack_from(self._memory)
        return Beat(count, step, phase.rstrip(b"\0").decode(errors="replace")) if count else None
