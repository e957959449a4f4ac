"""`mlax launch`: start processes that train together, and restart them if one dies or hangs."""

import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Self

from mlax.cli._process import Hang, HangDetector, WorkerProcess, describe_exit


def launch(
    processes: int,
    devices: int | None,
    restarts: int,
    hang: float,
    patience: float,
    grace: float,
    script: str,
    args: Sequence[str],
) -> int:
    """Run the script in several processes until it ends well, is told to end, or has failed too often."""
    if not Path(script).is_file():
        raise SystemExit(f"mlax launch: there is no script {script}.")
    ended = Outcome("", 0)
    with Supervisor(processes, devices, hang, patience, grace, script, args) as supervisor:
        for restart in range(1, restarts + 2):
            ended = supervisor.attempt()
            if ended.why:
                _say(ended.why)
            if not ended.why or not ended.again or supervisor.asked:
                break
            if restart <= restarts:
                _say(f"beginning again from the last checkpoint: restart {restart} of at most {restarts}")
        else:
            _say(f"given up after {restarts} restarts; go on with: {shlex.join(sys.orig_argv)}")
    return 128 - ended.status if ended.status < 0 else ended.status


def _say(words: str) -> None:
    print(f"mlax launch: {words}", file=sys.stderr, flush=True)


POLL = 0.05  # seconds between two looks
SETTLE = 0.5  # seconds in which the deaths that follow from a first one are seen too
FAREWELL = 3.0  # seconds between SIGTERM and SIGKILL for processes that have lost one of theirs
QUICK = 2.0  # the same while compiling, where nothing can be lost
TERMINATED = 128 + signal.SIGTERM


class Outcome(NamedTuple):
    """How an attempt ended."""

    why: str  # what went wrong, with the name of who did it; nothing if all went well
    status: int  # the exit status; negative for a signal
    again: bool = True  # whether it is worth another attempt


class Supervisor:
    """Runs a script in several processes; one that dies or hangs ends them all, and is named.

    While it is entered, SIGTERM and Ctrl-C are passed on to the processes as SIGTERM; the second of them kills.
    """

    def __init__(
        self,
        count: int,
        devices: int | None,
        hang: float,
        patience: float,
        grace: float,
        script: str,
        args: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.count, self.devices, self.hang, self.patience, self.grace = count, devices, hang, patience, grace
        self.script, self.args, self.clock = script, args, clock
        self.asked: list[int] = []  # signals that came
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, lambda number, frame: self.asked.append(number))
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def attempt(self) -> Outcome:
        """Start all processes, and give how they ended. When this returns none of them is left."""
        processes: list[WorkerProcess] = []
        with tempfile.TemporaryDirectory(prefix="mlax-launch-") as folder, _reserved_port() as port:
            try:
                processes += [self._start(index, port, Path(folder)) for index in range(self.count)]
                return self._watched(processes)
            finally:
                for process in processes:
                    process.send(signal.SIGKILL)
                for process in processes:
                    process.reap()
                    process.drained()

    def _start(self, index: int, port: int, folder: Path) -> WorkerProcess:
        beats = folder / f"beats-{index}"
        return WorkerProcess(index, beats, [sys.executable, "-u", *self.worker(index, port, beats)])

    def worker(self, index: int, port: int, beats: Path) -> list[str]:
        """What Python is to run as the process of this number."""
        task = {
            "index": index,
            "count": self.count,
            "port": port,
            "devices": self.devices,
            "beats": str(beats),
            "heartbeat": int(self.hang) + 30,  # JAX ends processes without naming one; the supervisor comes first
            "supervisor": os.getpid(),
            "command": sys.orig_argv,
        }
        return ["-m", "mlax.cli._worker", json.dumps(task), self.script, *self.args]

    def _watched(self, processes: list[WorkerProcess]) -> Outcome:
        hanging = HangDetector(processes, self.hang, self.patience, self.clock)
        while not self.asked:
            statuses = [process.status for process in processes]
            if all(status == 0 for status in statuses):
                return Outcome("", 0)
            if any(statuses):
                return self._dead(processes)
            if hung := hanging.look():
                return self._hung(processes, hung)
            time.sleep(POLL)
        return self._told(processes)

    def _dead(self, processes: list[WorkerProcess]) -> Outcome:
        """One has died; others may have died of that, and are not to blame."""
        self._wait(processes, SETTLE)
        stopped = [process for process in processes if process.state in ("T", "t")]
        dead = [(process, process.status) for process in processes if process.status]
        if all(status == TERMINATED for _, status in dead) and not stopped:
            self._wait(processes, self.grace)  # somebody else told them to end, and they do
            return Outcome("", TERMINATED)
        # a process that has lost another one is aborted by JAX or fails; no other signal comes from that
        process, status = min(dead, key=lambda pair: (_may_be_consequence(pair[1] or 0), pair[0].died))
        why = f"{process} {describe_exit(status or 0)}{_describe_position(process)}"
        if stopped:
            why = f"{stopped[0]} is stopped, as by SIGSTOP, and {process} gave up waiting for it"
        begun = (status or 0) < 0 or bool(stopped) or any(map(_has_trained, processes))
        self._end(processes)
        return Outcome(
            why if begun else f"{why}, before training began: it would do so again", status or 1, again=begun
        )

    def _hung(self, processes: list[WorkerProcess], hung: Hang) -> Outcome:
        for process in processes:
            process.send(signal.SIGUSR1)  # each prints where its threads are
        time.sleep(SETTLE)
        self._end(processes)
        return Outcome(f"{hung.process} {hung.why}", 124)

    def _told(self, processes: list[WorkerProcess]) -> Outcome:
        """A signal came: have all of them save and end, within the grace."""
        told, came = self.clock(), self.asked[0]
        for process in processes:
            process.send(signal.SIGTERM)
        lost: float | None = None  # since when one of them is dead that the others may wait for
        while any(process.status is None for process in processes):
            now = self.clock()
            if any(process.status not in (None, 0, TERMINATED, -signal.SIGTERM) for process in processes):
                lost = lost or now
            over = now - told > (QUICK if any(map(_is_compiling, processes)) else self.grace)
            if over or len(self.asked) > 1 or (lost is not None and now - lost > FAREWELL):
                self._end(processes, farewell=0)
                return Outcome("ended before all processes had saved; the last checkpoint is whole", -came, again=False)
            time.sleep(POLL)
        if all(process.status == 0 for process in processes):
            return Outcome("", 0)
        bad = [p for p in processes if p.status not in (0, TERMINATED, -signal.SIGTERM)]
        why = f"{bad[0]} {describe_exit(bad[0].status or 0)} while it was told to end" if bad else ""
        return Outcome(why, -came)

    def _end(self, processes: list[WorkerProcess], farewell: float = FAREWELL) -> None:
        for process in processes:
            process.send(signal.SIGTERM)
        self._wait(processes, farewell)
        for process in processes:
            process.send(signal.SIGKILL)

    def _wait(self, processes: list[WorkerProcess], seconds: float) -> None:
        until = self.clock() + seconds
        while self.clock() < until and any(process.status is None for process in processes):
            time.sleep(POLL)


def _may_be_consequence(status: int) -> bool:
    """Whether a process may end so because another one did."""
    return status >= 0 or status in (-signal.SIGABRT, -signal.SIGTERM)


def _is_compiling(process: WorkerProcess) -> bool:
    beat = process.beats.read()
    return beat is not None and beat.phase == "compiling"


def _has_trained(process: WorkerProcess) -> bool:
    return process.beats.read() is not None and not _is_compiling(process)


def _describe_position(process: WorkerProcess) -> str:
    beat = process.beats.read()
    return "" if beat is None else f", at {beat}"


@contextlib.contextmanager
def _reserved_port():
    """A port that nobody else is given. The coordinator can have it all the same: both ask for a shared one."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("localhost", 0))
        yield taken.getsockname()[1]
