"""Hanging: who does not move any more, and since when."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mlax.cli._process import Process

# Phases that may take long although all is well.
PATIENT = ("compiling", "compiling the evaluation", "saving", "ending")


class Hung(NamedTuple):
    """A process that hangs, and why that is thought."""

    process: Process
    why: str


class Hanging:
    """Looks at the beats of all processes. Once one has begun to train, silence of all of them means that one hangs.

    Which one: a process that is stopped, or else the one furthest behind, since the others wait for it. A script that
    never beats is never thought to hang, unless it is stopped.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        hang: float,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.processes, self.hang, self.patience, self.clock = processes, hang, patience, clock
        now = clock()
        self._moved = now
        self._running = {process.index: now for process in processes}  # when it was last seen not to be stopped
        self._counts: list[int] = []

    def look(self) -> Hung | None:
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
            return Hung(stopped[0], f"is stopped, as by SIGSTOP, for {self.hang:g} s")
        last = min(running, key=lambda process: counts[process.index], default=None)
        if last is None or (beat := beats[last.index]) is None:
            return None
        if now - self._moved <= (self.patience if beat.phase in PATIENT else self.hang):
            return None
        others = [f"process {p.index} at {beats[p.index]}" for p in running if p is not last]
        behind = f"; {', '.join(others)}" if others else ""
        return Hung(
            last, f"hangs: nothing moved for {now - self._moved:.0f} s, and it is furthest behind, at {beat}{behind}"
        )
