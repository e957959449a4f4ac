"""Signals that a training process receives, and heartbeats that it sends to its supervisor."""

import contextlib
import functools
import itertools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

from mlax._supervision import HEARTBEAT_BYTES, HEARTBEAT_VARIABLE, Phase

GRACE = 8.0  # seconds; `docker stop` and most process managers allow 10
CLUSTER_GRACE = 28.0  # Slurm's KillWait and Kubernetes' terminationGracePeriodSeconds are 30, unless configured
NEAR_THE_TIME_LIMIT = 900.0  # seconds before the end of a Slurm job, in which a signal announces that end
INTERRUPT_TIMEOUT = 2.0  # seconds in which a second Ctrl-C should end the process

_ENDING = (signal.SIGTERM, signal.SIGHUP)  # the process exits after them; after Ctrl-C it need not


class Signals:
    """A context in which `pending()` names the signal that arrived, if any: SIGINT (Ctrl-C), SIGTERM or SIGHUP.

    The first Ctrl-C sets the flag only; the second raises KeyboardInterrupt. A loop that has seen SIGTERM or
    SIGHUP by `pending` or `poll_all` ends by itself, however long its last save takes. If it does not poll it
    within `grace` seconds, the process exits, as Python cannot interrupt a long call into compiled code: at once during
    a `killable()` call, such as a compilation, and not during an `unkillable()` one, such as a save.

    With several processes, JAX's preemption service collects SIGTERM, and all of them see it at the same call of
    `poll_all`; the sender decides on the grace period. Other signals become SIGTERM, since no process can stop alone.
    """

    def __init__(self, grace: float | None = None):
        self.grace = grace
        self._pending = ""
        self._killable = self._unkillable = False
        self._acknowledged = threading.Event()
        self._left = threading.Event()
        self._previous: dict[int, Any] = {}  # handlers
        self._pipe: tuple[int, int] | None = None
        self._polls = 0

    def pending(self) -> str:
        """The name of the signal that arrived, or an empty string."""
        if self._pending and threading.current_thread() is threading.main_thread():
            self.acknowledge()
        return self._pending

    def poll_all(self) -> str:
        """Like `pending`, with the same answer in all processes, which must all call it equally often."""
        self._polls += 1
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(self._polls):
            self._pending = "SIGTERM"
        return self.pending()

    def acknowledge(self) -> None:
        """Confirm that the loop is about to end."""
        self._acknowledged.set()

    @contextlib.contextmanager
    def killable(self) -> Iterator[None]:
        """Around a long call during which the process may exit at once, since nothing would be lost."""
        self._killable = True
        try:
            yield
        finally:
            self._killable = False

    @contextlib.contextmanager
    def unkillable(self) -> Iterator[None]:
        """Around a call that must end, however long it takes, since it saves what would be lost."""
        self._unkillable = True
        try:
            yield
        finally:
            self._unkillable = False

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python handles signals in the main thread only
        handled = [signal.SIGINT, signal.SIGHUP, *([signal.SIGTERM] if jax.process_count() == 1 else [])]
        # a signal that is ignored stays so: nohup does that to SIGHUP
        wanted = [number for number in handled if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._handle) for number in wanted}
        self._start_watchdog()
        return self

    def __exit__(self, *error: object) -> None:
        self.acknowledge()
        self._left.set()
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._pipe[1])  # ends the watchdog
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if jax.process_count() == 1:
            self._pending = signal.Signals(number).name
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        if number == signal.SIGINT:
            if not self._killable:
                _say("\nstopping after this step and saving; press Ctrl-C again to quit at once")
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _start_watchdog(self) -> None:
        """Have the operating system tell a thread of each signal, since the main thread may be busy."""
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        previous = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        if previous != -1:  # an event loop, as in a notebook, already uses the wakeup fd; it needs it more
            signal.set_wakeup_fd(previous)
            os.close(read_end)
            os.close(write_end)
            return
        self._pipe = read_end, write_end
        threading.Thread(target=self._watch, args=(read_end,), daemon=True, name="mlax signals").start()

    def _watch(self, read_end: int) -> None:
        interrupts = 0
        with os.fdopen(read_end, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                received = number[0]
                if received == signal.SIGINT:
                    interrupts += 1
                    self._watch_interrupt(interrupts)
                elif received in _ENDING and received in self._previous and not self._acknowledged.is_set():
                    self._watch_end(signal.Signals(received))

    def _watch_interrupt(self, count: int) -> None:
        """Answer Ctrl-C where the main thread cannot, and have the second one end the process."""
        if count == 1:
            if self._killable:
                _say("\ncompiling: stops once that is done; press Ctrl-C again to quit at once")
        elif not hasattr(sys, "ps1"):  # the state of an interactive session is never discarded
            if not self._killable:
                self._left.wait(INTERRUPT_TIMEOUT)  # KeyboardInterrupt may get through
            if not self._left.is_set():
                _say("Ctrl-C: quitting; all saved checkpoints are complete")
                os._exit(128 + signal.SIGINT)

    def _watch_end(self, received: signal.Signals) -> None:
        """Exit if the loop does not poll the signal in time."""
        self._pending = received.name
        grace = self.grace if self.grace is not None else default_grace(os.environ, time.time())
        waited = 0.0
        while not self._killable and waited < grace and not self._acknowledged.wait(0.05):
            waited += 0.0 if self._unkillable else 0.05
        if not self._acknowledged.is_set():
            where = "compiling" if self._killable else f"in a call longer than the grace period of {grace:g} s"
            _say(f"{received.name} while {where}: exiting; all saved checkpoints are complete")
            os._exit(128 + received)


def default_grace(environment: Mapping[str, str], now: float) -> float:
    """The seconds between SIGTERM and SIGKILL, as far as the environment of the process shows them."""
    if HEARTBEAT_VARIABLE in environment:
        return math.inf  # the supervisor ends what does not end by itself
    if "SLURM_JOB_ID" in environment:
        # `--signal=TERM@120` announces the time limit; other signals come from scancel or a preemption
        with contextlib.suppress(ValueError):
            left = float(environment.get("SLURM_JOB_END_TIME", "")) - now
            return max(left - 2, CLUSTER_GRACE) if left <= NEAR_THE_TIME_LIMIT else CLUSTER_GRACE
        return CLUSTER_GRACE
    return CLUSTER_GRACE if "KUBERNETES_SERVICE_HOST" in environment else GRACE


def exit_status(stopped: str) -> int:
    """The exit status of a process that a signal has stopped, as shells report it."""
    return 128 + signal.Signals[stopped]


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone, and saving matters more
        print(text, file=sys.stderr, flush=True)


def heartbeat(step: int, phase: str = Phase.STEP) -> None:
    """Report to the supervisor that the main thread is alive, after `step` steps and in this phase.

    `fit` does so before each step, wait for data, evaluation and save; a custom training loop under `mlax launch` calls
    it once per step. The count of heartbeats, the step and the phase are written to the file that the environment
    variable MLAX_HEARTBEAT names, which `mlax launch` sets for each of its processes. Without it nothing happens.
    """
    with contextlib.suppress(OSError):  # training continues if the disk is full
        if (file := _heartbeat_file()) is not None:
            descriptor, counts = file
            os.pwrite(descriptor, f"{next(counts)} {step} {phase}".encode().ljust(HEARTBEAT_BYTES), 0)


@functools.cache
def _heartbeat_file() -> tuple[int, Iterator[int]] | None:
    path = os.environ.get(HEARTBEAT_VARIABLE)
    return None if not path else (os.open(path, os.O_WRONLY | os.O_CREAT), itertools.count(1))
