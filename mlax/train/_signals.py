"""Signals: SIGTERM and Ctrl-C as something that a loop can ask about, and that no long call can hold up."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

TERMINATED = 128 + signal.SIGTERM  # the exit status that shells give


class Signals:
    """While it is entered, `asked()` says which signal came, if any.

    The first Ctrl-C only asks; the second one raises KeyboardInterrupt. A loop that was asked says `heard()`. If it
    does not within `grace` seconds, or is away where nothing can be lost, as in a compilation, the process ends with
    the status that SIGTERM gives: Python itself cannot interrupt a long call into compiled code.

    With several processes JAX's own service collects SIGTERM, and all of them hear of it at the same `together`; the
    grace is that of whoever sent it. Ctrl-C is passed on as SIGTERM, since one process alone cannot stop.
    """

    def __init__(self, grace: float = 8.0):
        self.grace = grace
        self._asked = ""
        self._away = False
        self._heard = threading.Event()
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._polls = 0

    def asked(self) -> str:
        """The name of the signal that came, or nothing."""
        return self._asked

    def together(self) -> str:
        """The same, in all processes: each must call it equally often, and all get the same answer."""
        self._polls += 1
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(self._polls):
            self._asked = "SIGTERM"
        return self._asked

    def heard(self) -> None:
        """Say that the loop will end by itself."""
        self._heard.set()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Around a long call during which the process may end at once, since nothing can be lost."""
        self._away = True
        try:
            yield
        finally:
            self._away = False

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python takes signals in the main thread only
        wanted = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
        self._before = {number: signal.signal(number, self._handle) for number in wanted}
        self._watch()
        return self

    def __exit__(self, *error: object) -> None:
        self.heard()
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._pipe[1])  # ends the watching thread
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if jax.process_count() == 1:
            self._asked = signal.Signals(number).name
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        if number == signal.SIGINT:
            print("\nstopping after this step and saving; press Ctrl-C again to quit at once", file=sys.stderr)
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _watch(self) -> None:
        """Have a thread told of each signal by the operating system, since the main thread may be busy."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        taken = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if taken != -1:  # an event loop, as in a notebook, is told of signals already; it needs them more
            signal.set_wakeup_fd(taken)
            os.close(reading)
            os.close(writing)
            return
        self._pipe = reading, writing
        threading.Thread(target=self._watched, args=(reading,), daemon=True, name="mlax signals").start()

    def _watched(self, reading: int) -> None:
        with os.fdopen(reading, "rb", buffering=0) as told:
            while number := told.read(1):
                if number[0] != signal.SIGTERM or self._heard.is_set():
                    continue
                self._asked = "SIGTERM"
                waited = 0.0
                while not self._away and waited < self.grace and not self._heard.wait(0.05):
                    waited += 0.05
                if not self._heard.is_set():
                    what = "in a long call" if waited >= self.grace else "compiling"
                    print(
                        f"SIGTERM came while {what}: ended; the last checkpoint is whole", file=sys.stderr, flush=True
                    )
                    os._exit(TERMINATED)
