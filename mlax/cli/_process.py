"""A worker process as its supervisor sees it: its output, its heartbeats, and whether it hangs."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import mlax
from mlax._supervision import (
    ALL_FINISHED_OFFSET,
    FINISHED_OFFSET,
    HEARTBEAT_BYTES,
    HEARTBEAT_VARIABLE,
    SLOW_PHASES,
)

# Loads this package, wherever it is, without its folder on the path, and calls a function with the arguments.
_CALL_FUNCTION = """
import importlib, importlib.util, sys
path, module, function = sys.argv[1:4]
del sys.argv[1:4]
spec = importlib.util.spec_from_file_location("mlax", path)
sys.modules["mlax"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["mlax"])
sys.exit(getattr(importlib.import_module(module), function)(sys.argv[1:]))
"""
NOISE = b"[Gloo] Rank"  # how the lines begin that the CPU collectives print about each connection
MAX_LINE_BYTES = 1 << 16  # longer ones are printed in several lines, so that they need not be held in memory


class Heartbeat(NamedTuple):
    """A heartbeat. All workers send the same ones in the same order, so the lowest `count` is furthest behind."""

    count: int
    step: int
    phase: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}"


class WorkerProcess:
    """A subprocess in its own session, so that Ctrl-C in the terminal reaches the supervisor only.

    It writes its heartbeats to a file without a name, so that nothing is left of it however the supervisor ends.
    """

    def __init__(self, index: int, command: Sequence[str]):
        self.index = index
        self._report = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # `drain` closes it
        descriptor = self._report.fileno()
        self.popen = subprocess.Popen(
            command,
            env={**os.environ, HEARTBEAT_VARIABLE: f"/dev/fd/{descriptor}"},  # see train.heartbeat
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(descriptor,),
        )
        self.status: int | None = None  # the exit status, negative for a signal; None while it runs
        self.died_at = math.inf
        pairs = ((self.popen.stdout, sys.stdout), (self.popen.stderr, sys.stderr))
        self._readers = [threading.Thread(target=self._forward, args=pair, daemon=True) for pair in pairs]
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        for thread in (*self._readers, self._waiter):
            thread.start()

    @property
    def state(self) -> str:
        """The state letter of /proc, T if it is stopped; empty where there is no /proc."""
        try:
            return Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def heartbeat(self) -> Heartbeat | None:
        """The last heartbeat; None before the first."""
        with contextlib.suppress(OSError, ValueError):
            text = os.pread(self._report.fileno(), HEARTBEAT_BYTES, 0).decode(errors="replace")
            count, step, phase = text.split(maxsplit=2)
            return Heartbeat(int(count), int(step), phase.rstrip(" \0"))
        return None

    @property
    def has_finished(self) -> bool:
        """Whether its script has ended; the process may still be about to exit."""
        return os.pread(self._report.fileno(), 1, FINISHED_OFFSET) == b"1"

    def tell_all_finished(self) -> None:
        """Tell it that the scripts of all processes have ended, so that none needs another any more."""
        os.pwrite(self._report.fileno(), b"1", ALL_FINISHED_OFFSET)

    def send(self, number: int) -> None:
        """Send a signal to it and its children, if any of them still runs."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)

    def reap(self) -> None:
        """Wait for its end. Its pid may be reused from then on, so no signal must be sent."""
        self._waiter.join()
        self.popen.wait()

    def drain(self) -> None:
        """Wait until its output is printed; not forever, since a child may hold the pipe."""
        for reader in self._readers:
            reader.join(2)
        self._report.close()

    def __str__(self) -> str:
        return f"process {self.index} (pid {self.popen.pid})"

    def _wait(self) -> None:
        if hasattr(os, "waitid"):  # leaves it a zombie, whose pid is not reused, so that `send` cannot hit another
            end = os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOWAIT)
            assert end is not None
            status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        else:
            status = self.popen.wait()
        self.died_at, self.status = time.monotonic(), status

    def _forward(self, source: IO[bytes], target: IO[str]) -> None:
        """Print what it prints, line by line, with its index."""
        with source:
            while line := source.readline(MAX_LINE_BYTES):
                if not line.startswith(NOISE):
                    target.write(f"[{self.index}] {line.decode(errors='replace').rstrip()}\n")
                    target.flush()


class Hang(NamedTuple):
    """A process that hangs, and why it is thought to."""

    process: WorkerProcess
    why: str


class HangDetector:
    """Finds the process that hangs: one that is stopped, or the one furthest behind if none sent a heartbeat for long.

    Long is `hang` seconds, or `slow_timeout` in SLOW_PHASES; the other processes wait for that one. A script without
    heartbeats is never thought to hang, unless it is stopped.
    """

    def __init__(
        self,
        processes: Sequence[WorkerProcess],
        hang: float,
        slow_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.processes, self.hang, self.slow_timeout, self.clock = processes, hang, slow_timeout, clock
        now = clock()
        self._changed_at = now  # when any process last sent a heartbeat
        self._ran_at = {process.index: now for process in processes}  # when it was last seen not to be stopped
        self._counts: list[int] = []

    def check(self) -> Hang | None:
        """The process that hangs, if one does."""
        now = self.clock()
        running = [process for process in self.processes if process.status is None]
        for process in running:
            if process.state not in ("T", "t"):
                self._ran_at[process.index] = now
        beats = [process.heartbeat() for process in self.processes]
        counts = [0 if beat is None else beat.count for beat in beats]
        if counts != self._counts:
            self._counts, self._changed_at = counts, now
        stopped = [process for process in running if now - self._ran_at[process.index] > self.hang]
        if stopped:
            return Hang(stopped[0], f"has been stopped for {self.hang:g} s, as by SIGSTOP")
        last = min(running, key=lambda process: counts[process.index], default=None)
        if last is None or (beat := beats[last.index]) is None:
            return None
        silent = now - self._changed_at
        if silent <= (self.slow_timeout if beat.phase in SLOW_PHASES else self.hang):
            return None
        others = [f"process {p.index} at {beats[p.index]}" for p in running if p is not last]
        rest = f"; {', '.join(others)}" if others else ""
        return Hang(last, f"hangs: no heartbeat for {silent:.0f} s, and it is furthest behind, at {beat}{rest}")


def package_command(module: str, function: str, *args: str) -> list[str]:
    """The arguments of Python that call a function of this package with a list of arguments.

    By -P and not by -m: a file in the current folder, such as ./ctypes.py, must not be imported in place of Python's.
    """
    return ["-P", "-c", _CALL_FUNCTION, mlax.__file__, module, function, *args]


def describe_exit(status: int) -> str:
    """An exit status as a phrase."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
