"""Profiling: a trace of a few steps of a run, for Perfetto and TensorBoard."""

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax

from mlax._supervision import Phase
from mlax.inspect import format_bytes
from mlax.train._checks import int_or_none
from mlax.train._signals import heartbeat

TRACE_NAME = "train"  # of each call of the step in the trace


class Profile:
    """Traces the calls of a step that contain the steps from `first` to `last`, without what runs before and after.

    `window` is (first, last), both included, or None. The trace goes into `folder`, or into a temporary one.
    """

    def __init__(self, window: tuple[int, int] | None, folder: Path | None, report: Callable[[str], None]):
        self.window, self.folder, self.report = window, folder, report
        self._call = contextlib.ExitStack()  # names one call of the step in the trace
        self._traced: list[int] = []  # the first and the last step of each call in the trace that is open
        self._reached = 0  # the last step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._traced:
            self._stop()
        elif self.window is not None and 0 < self._reached < self.window[0]:
            self.report(f"no profile: training ended at step {self._reached}, before step {self.window[0]}")

    def before(self, first: int, last: int, state: Any) -> None:
        """Before a call that makes the steps from `first` to `last`: start the trace if one is in the window."""
        if self.window is None or last < self.window[0] or first > self.window[1]:
            return
        if not self._traced:
            jax.block_until_ready(state)
            if not self._start():
                return
        self._traced += first, last
        self._call.enter_context(jax.profiler.StepTraceAnnotation(TRACE_NAME, step_num=first))

    def after(self, step: int, state: Any) -> None:
        """After a call of the step that ended with `step`: stop the trace if the window ends."""
        if self.window is None:
            return
        self._reached = step
        self._call.close()
        if self._traced and step >= self.window[1]:
            jax.block_until_ready(state)
            heartbeat(step, Phase.SAVING)  # a large trace takes a while
            self._stop()

    def _start(self) -> bool:
        self.folder = self.folder or Path(tempfile.mkdtemp(prefix="mlax-profile-"))
        try:
            jax.profiler.start_trace(self.folder, create_perfetto_trace=True)
        except Exception as error:  # such as another trace in progress
            self.window = None
            self.report(f"no profile: the trace could not be started: {error}")
        return self.window is not None

    def _stop(self) -> None:
        self._call.close()
        try:
            jax.profiler.stop_trace()
            self.report(self._describe())
        except Exception as error:  # such as a full disk
            self.report(f"no profile: the trace could not be written: {error}")
        self.window, self._traced = None, []

    def _describe(self) -> str:
        assert self.folder is not None
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        newest = max(files, key=lambda path: path.stat().st_mtime)
        trace = next(newest.parent.glob("perfetto_trace.json.gz"))
        size = sum(path.stat().st_size for path in newest.parent.iterdir())
        return (
            f"profile of steps {min(self._traced)} to {max(self._traced)}, {format_bytes(size)}: open {trace} in "
            f"https://ui.perfetto.dev, or run tensorboard --logdir {self.folder} (with xprof)"
        )


def check_window(window: Any) -> tuple[int, int] | None:
    """(first, last) as ints; None stays None."""
    if window is None:
        return None
    first, last = map(int_or_none, window) if isinstance(window, list | tuple) and len(window) == 2 else (None, None)
    if first is None or last is None or not 1 <= first <= last:
        raise ValueError(
            f"fit: profile is {window!r}, but must be the first and the last step to trace, counted from 1: (100, 105)."
        )
    return first, last
