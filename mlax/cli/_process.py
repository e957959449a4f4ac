"""A worker process as its supervisor sees it: its output, its heartbeats, and whether it hangs."""

import contextlib
import math
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

_FORMAT = struct.Struct("=QQ40s")  # beats so far, step, phase


class Heartbeat(NamedTuple):
    """Where a worker is. All workers beat in the same order, so the least `count` is the one furthest behind."""

    count: int
    step: int
    phase: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}"


class HeartbeatFile:
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

    def read(self) -> Heartbeat | None:
        """Where the worker is; None before it has said so."""
        count, step, phase = _FORMAT.unpack_from(self._memory)
        return Heartbeat(count, step, phase.rstrip(b"\0").decode(errors="replace")) if count else None


NOISE = b"[Gloo] Rank"  # lines that the collectives of CPUs print about each connection


class WorkerProcess:
    """A worker, in a session of its own: a Ctrl-C in the terminal reaches the supervisor alone."""

    def __init__(self, index: int, beats: Path, command: Sequence[str]):
        self.index = index
        self.beats = HeartbeatFile(beats)
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        pairs = ((self.popen.stdout, sys.stdout), (self.popen.stderr, sys.stderr))
        self._readers = [threading.Thread(target=self._pass_on, args=pair, daemon=True) for pair in pairs]
        self.status: int | None = None  # the exit status, negative for a signal; None while it runs
        self.died = math.inf  # when, to tell who was first
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        for thread in (*self._readers, self._waiter):
            thread.start()

    @property
    def state(self) -> str:
        """The letter that the system has for what it does: T is stopped. Nothing where the system does not tell."""
        try:
            return Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def send(self, number: int) -> None:
        """Send a signal to it and all that it started; nothing happens if all of them have ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)

    def reap(self) -> None:
        """Wait for its end, after which its number may be given to another process: no signal must follow."""
        self._waiter.join()
        self.popen.wait()

    def drained(self) -> None:
        """Wait until its last words are printed; not for ever, since a child of it may hold the pipe."""
        for reader in self._readers:
            reader.join(2)

    def __str__(self) -> str:
        return f"process {self.index} (pid {self.popen.pid})"

    def _wait(self) -> None:
        if hasattr(os, "waitid"):  # leaves the number to the dead process, so that `send` can hit nobody else
            end = os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOWAIT)
            assert end is not None
            status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        else:
            status = self.popen.wait()
        self.died, self.status = time.monotonic(), status

    def _pass_on(self, source: IO[bytes], target: IO[str]) -> None:
        with source:
            for line in source:
                if not line.startswith(NOISE):
                    target.write(f"[{self.index}] {line.decode(errors='replace').rstrip()}\n")
                    target.flush()


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


# Phases that may take long although all is well.
SLOW_PHASES = ("compiling", "compiling the evaluation", "saving", "ending")


class Hang(NamedTuple):
    """A process that hangs, and why that is thought."""

    process: WorkerProcess
    why: str


class HangDetector:
    """Looks at the beats of all processes. Once one has begun to train, silence of all of them means that one hangs.

    Which one: a process that is stopped, or else the one furthest behind, since the others wait for it. A script that
    never beats is never thought to hang, unless it is stopped.
    """

    def __init__(
        self,
        processes: Sequence[WorkerProcess],
        hang: float,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.processes, self.hang, self.patience, self.clock = processes, hang, patience, clock
        now = clock()
        self._moved = now
        self._running = {process.index: now for process in processes}  # when it was last seen not to be stopped
        self._counts: list[int] = []

    def look(self) -> Hang | None:
        """The process that hangs, if one does."""
        now = self.clock()
        running = [process for process in self.processes if process.status is None]
        for process in running:
            if process.state not in ("T", "t"):
                self._running[process.index] = now
        beats = [process.beats.read() for process in self.processes]
        counts = [0 if beat is None else beat.count for beat in beats]
        if counts != self._counts:
            self._counts, self._moved = counts, now
        stopped = [process for process in running if now - self._running[process.index] > self.hang]
        if stopped:
            return Hang(stopped[0], f"is stopped, as by SIGSTOP, for {self.hang:g} s")
        last = min(running, key=lambda process: counts[process.index], default=None)
        if last is None or (beat := beats[last.index]) is None:
            return None
        if now - self._moved <= (self.patience if beat.phase in SLOW_PHASES else self.hang):
            return None
        others = [f"process {p.index} at {beats[p.index]}" for p in running if p is not last]
        behind = f"; {', '.join(others)}" if others else ""
        return Hang(
            last, f"hangs: nothing moved for {now - self._moved:.0f} s, and it is furthest behind, at {beat}{behind}"
        )
