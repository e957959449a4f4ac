"""A worker as its supervisor sees it: a process with a number, its output, and where it says it is."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from mlax.cli._beats import Beats

NOISE = b"[Gloo] Rank"  # lines that the collectives of CPUs print about each connection


class Process:
    """A worker, in a session of its own: a Ctrl-C in the terminal reaches the supervisor alone."""

    def __init__(self, index: int, beats: Path, command: Sequence[str]):
        self.index = index
        self.beats = Beats(beats)
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


def ending(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
