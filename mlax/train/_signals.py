"""Signals that a training process receives, and heartbeats that it sends to its supervisor."""

import contextlib
import functools
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

from mlax._supervision import HEARTBEAT_VARIABLE, TERMINATED, Phase


class Signals:
    """A context in which `pending()` names the signal that arrived, if any.

    The first Ctrl-C sets the flag only; the second raises KeyboardInterrupt. A loop that ends because of the flag calls
    `acknowledge()`. If it does not within `grace` seconds, or is in a `killable()` call such as a compilation, the
    process exits with the status of SIGTERM: Python itself cannot interrupt a long call into compiled code.

    With several processes, JAX's preemption service collects SIGTERM, and all of them see it at the same call of
    `poll_all`; the sender decides on the grace period. Ctrl-C becomes SIGTERM, since one process cannot stop alone.
    """

    def __init__(self, grace: float = 8.0):
        self.grace = grace
        self._pending = ""
        self._killable = False
        self._acknowledged = threading.Event()
        self._previous: dict[int, Any] = {}  # handlers
        self._pipe: tuple[int, int] | None = None
        self._polls = 0

    def pending(self) -> str:
        """The name of the signal that arrived, or an empty string."""
        return self._pending

    def poll_all(self) -> str:
        """Like `pending`, with the same answer in all processes, which must all call it equally often."""
        self._polls += 1
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(self._polls):
            self._pending = "SIGTERM"
        return self._pending

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

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python handles signals in the main thread only
        handled = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
        self._previous = {number: signal.signal(number, self._handle) for number in handled}
        self._start_watchdog()
        return self

    def __exit__(self, *error: object) -> None:
        self.acknowledge()
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
            print("\nstopping after this step and saving; press Ctrl-C again to quit at once", file=sys.stderr)
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
        with os.fdopen(read_end, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] != signal.SIGTERM or self._acknowledged.is_set():
                    continue
                self._pending = "SIGTERM"
                waited = 0.0
                while not self._killable and waited < self.grace and not self._acknowledged.wait(0.05):
                    waited += 0.05
                if not self._acknowledged.is_set():
                    where = "in a long call" if waited >= self.grace else "compiling"
                    print(
                        f"SIGTERM while {where}: exiting; the last checkpoint is complete", file=sys.stderr, flush=True
                    )
                    os._exit(TERMINATED)


def heartbeat(step: int, phase: str = Phase.STEP) -> None:
    """Report to the supervisor that the main thread is alive, after `step` steps and in this phase.

    `fit` does so before each step, wait for data, evaluation and save; a custom training loop under `mlax launch` calls
    it once per step. The count of heartbeats, the step and the phase are written to the file that the environment
    variable MLAX_HEARTBEAT names, which `mlax launch` sets for each of its processes. Without it nothing happens.
    """
    with contextlib.suppress(OSError):  # training continues if the disk is full
        if (file := _heartbeat_file()) is not None:
            descriptor, counts = file
            os.pwrite(descriptor, f"{next(counts)} {step} {phase}".encode().ljust(64), 0)


@functools.cache
def _heartbeat_file() -> tuple[int, Iterator[int]] | None:
    path = os.environ.get(HEARTBEAT_VARIABLE)
    return None if not path else (os.open(path, os.O_WRONLY | os.O_CREAT), itertools.count(1))
