"""`mlax launch`: start processes that train together, and restart them if one dies or hangs."""

import contextlib
import json
import math
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Self

from mlax._supervision import LOOPBACK, TERMINATED, Phase
from mlax.cli._process import Hang, HangDetector, WorkerProcess, describe_exit, package_command

POLL_INTERVAL = 0.05  # seconds between two checks
FOLLOW_UP_WINDOW = 0.5  # seconds in which the deaths that follow from a first one are observed too
KILL_TIMEOUT = 3.0  # seconds between SIGTERM and SIGKILL for processes that lost one of their peers
KILL_TIMEOUT_COMPILING = 2.0  # the same while compiling, when nothing can be lost


class Outcome(NamedTuple):
    """The result of one attempt to run the script: the failure, if any, the exit status, and whether to retry."""

    why: str  # which process failed, and how; empty on success
    status: int  # the exit status; negative for a signal
    retry: bool = True  # whether another attempt makes sense


def launch(
    processes: int,
    devices: int | None,
    restarts: int,
    hang: float,
    slow_timeout: float,
    grace: float,
    script: str,
    args: Sequence[str],
) -> int:
    """Run a script in several processes until it succeeds, is stopped by a signal, or has failed too often."""
    if not Path(script).is_file():
        raise SystemExit(f"mlax launch: there is no script {script}.")
    outcome = Outcome("", 0)
    with Supervisor(processes, devices, hang, slow_timeout, grace, script, args) as supervisor:
        for restart in range(1, restarts + 2):
            outcome = supervisor.attempt()
            if outcome.why:
                _report(outcome.why)
            if not outcome.why or not outcome.retry or supervisor.signals:
                break
            if restart <= restarts:
                _report(f"restarting from the last checkpoint: restart {restart} of at most {restarts}")
        else:
            _report(f"giving up after {restarts} restarts; resume with: {shlex.join(sys.orig_argv)}")
    return 128 - outcome.status if outcome.status < 0 else outcome.status


def _report(message: str) -> None:
    print(f"mlax launch: {message}", file=sys.stderr, flush=True)


class Supervisor:
    """Runs a script in several processes; if one dies or hangs, it reports which, and terminates them all.

    While it is entered, SIGTERM, SIGHUP and Ctrl-C are forwarded to the processes as SIGTERM; a second signal kills
    them.
    """

    def __init__(
        self,
        count: int,
        devices: int | None,
        hang: float,
        slow_timeout: float,
        grace: float,
        script: str,
        args: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.count, self.devices, self.hang, self.slow_timeout, self.grace = count, devices, hang, slow_timeout, grace
        self.script, self.args, self.clock = script, args, clock
        self.signals: list[int] = []  # received so far
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}  # handlers

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup ignores SIGHUP
            self._previous[number] = signal.signal(number, lambda number, frame: self.signals.append(number))
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def attempt(self) -> Outcome:
        """Start all processes and wait until all of them have ended."""
        processes: list[WorkerProcess] = []
        with _reserve_port() as port:
            try:
                for index in range(self.count):
                    command = [sys.executable, "-u", *self.worker_args(index, port)]
                    processes.append(WorkerProcess(index, command))
                return self._supervise(processes)
            finally:
                for process in processes:
                    process.send(signal.SIGKILL)
                for process in processes:
                    process.reap()
                    process.drain()

    def worker_args(self, index: int, port: int) -> list[str]:
        """The arguments of Python for the process of this index."""
        task = {
            "index": index,
            "count": self.count,
            "port": port,
            "devices": self.devices,
            "heartbeat_timeout": int(self.hang) + 30,  # JAX's own; it does not report which process hangs
            "supervisor": os.getpid(),
            "command": sys.orig_argv,
        }
        return package_command("mlax.cli._worker", "start", json.dumps(task), self.script, *self.args)

    def _supervise(self, processes: list[WorkerProcess]) -> Outcome:
        detector = HangDetector(processes, self.hang, self.slow_timeout, self.clock)
        while not self.signals:
            statuses = [process.status for process in processes]
            if all(status == 0 for status in statuses):
                return Outcome("", 0)
            self._announce_end(processes)
            if any(statuses):
                return self._handle_death(processes)
            if hang := detector.check():
                return self._handle_hang(processes, hang)
            time.sleep(POLL_INTERVAL)
        return self._handle_signal(processes)

    def _announce_end(self, processes: list[WorkerProcess]) -> None:
        if all(process.has_finished for process in processes):
            for process in processes:
                process.tell_all_finished()

    def _handle_death(self, processes: list[WorkerProcess]) -> Outcome:
        """Find the process that died first: others may have died because of it."""
        self._wait(processes, FOLLOW_UP_WINDOW)
        stopped = [process for process in processes if process.state in ("T", "t")]
        dead = [(process, process.status) for process in processes if process.status]
        if all(status == TERMINATED for _, status in dead) and not stopped:
            self._wait(processes, self.grace)  # somebody else sent SIGTERM, and they are saving
            return Outcome("", TERMINATED)
        # a process that has lost a peer fails or is aborted by JAX; any other signal has another cause
        process, status = min(dead, key=lambda pair: (_may_be_consequence(pair[1] or 0), pair[0].died_at))
        why = f"{process} {describe_exit(status or 0)}{_describe_position(process)}"
        if _may_be_consequence(status or 0) and (early := _exited_early(processes, process.died_at)):
            why = f"{early} {_describe_early_exit(early)}, without which {process} {describe_exit(status or 0)}"
        if stopped:
            why = f"{stopped[0]} is stopped, as by SIGSTOP, and {process} gave up waiting for it"
        retry = (status or 0) < 0 or bool(stopped) or any(map(_has_trained, processes))
        self._terminate(processes)
        return Outcome(why if retry else f"{why}, before training started: not restarted", status or 1, retry)

    def _handle_hang(self, processes: list[WorkerProcess], hang: Hang) -> Outcome:
        for process in processes:
            process.send(signal.SIGUSR1)  # each prints the stacks of its threads
        time.sleep(FOLLOW_UP_WINDOW)
        self._terminate(processes)
        if early := _exited_early(processes, math.inf):
            return Outcome(f"{early} {_describe_early_exit(early)}, and {hang.process} waits for it", 124)
        return Outcome(f"{hang.process} {hang.why}", 124)

    def _handle_signal(self, processes: list[WorkerProcess]) -> Outcome:
        """Let all processes save and exit within the grace period."""
        started, received = self.clock(), self.signals[0]
        for process in processes:
            process.send(signal.SIGTERM)
        lost_at: float | None = None  # when a process died for which the others may wait
        while any(process.status is None for process in processes):
            now = self.clock()
            if any(process.status not in (None, 0, TERMINATED, -signal.SIGTERM) for process in processes):
                lost_at = lost_at or now
            expired = now - started > (KILL_TIMEOUT_COMPILING if any(map(_is_compiling, processes)) else self.grace)
            if expired or len(self.signals) > 1 or (lost_at is not None and now - lost_at > KILL_TIMEOUT):
                self._terminate(processes, timeout=0)
                why = "killed before all processes had saved; the last checkpoint is complete"
                return Outcome(why, -received, retry=False)
            self._announce_end(processes)
            time.sleep(POLL_INTERVAL)
        if all(process.status == 0 for process in processes):
            return Outcome("", 0)
        failed = [p for p in processes if p.status not in (0, TERMINATED, -signal.SIGTERM)]
        why = f"{failed[0]} {describe_exit(failed[0].status or 0)} while it was saving to exit" if failed else ""
        return Outcome(why, -received)

    def _terminate(self, processes: list[WorkerProcess], timeout: float = KILL_TIMEOUT) -> None:
        for process in processes:
            process.send(signal.SIGTERM)
        self._wait(processes, timeout)
        for process in processes:
            process.send(signal.SIGKILL)

    def _wait(self, processes: list[WorkerProcess], seconds: float) -> None:
        deadline = self.clock() + seconds
        while self.clock() < deadline and any(process.status is None for process in processes):
            time.sleep(POLL_INTERVAL)


def _may_be_consequence(status: int) -> bool:
    """Whether a process may end like this because another one did."""
    return status >= 0 or status in (-signal.SIGABRT, -signal.SIGTERM)


def _exited_early(processes: list[WorkerProcess], before: float) -> WorkerProcess | None:
    """The first process that exited with status 0 before its script had ended, as by os._exit(0)."""
    early = [p for p in processes if p.status == 0 and p.died_at < before and not p.has_finished]
    return min(early, key=lambda process: process.died_at, default=None)


def _describe_early_exit(process: WorkerProcess) -> str:
    return f"exited with status 0 before its script had ended{_describe_position(process)}"


def _is_compiling(process: WorkerProcess) -> bool:
    beat = process.heartbeat()
    return beat is not None and beat.phase == Phase.COMPILING


def _has_trained(process: WorkerProcess) -> bool:
    return process.heartbeat() is not None and not _is_compiling(process)


def _describe_position(process: WorkerProcess) -> str:
    beat = process.heartbeat()
    return "" if beat is None else f", at {beat}"


@contextlib.contextmanager
def _reserve_port() -> Iterator[int]:
    """A port that no other process is given; the coordinator can still bind it, since both set SO_REUSEPORT."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((LOOPBACK, 0))
        yield reserved.getsockname()[1]
