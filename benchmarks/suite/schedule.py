"""Run entries in processes of their own: several start side by side, then each compiles and measures in its turn.

XLA times kernels to choose among them, so that nothing else may use the device meanwhile. PyTorch leaves products to
cuBLAS, and its programs compile side by side, before the others. The libraries that do one work run their repetitions
in turn, so that the temperature of the device and other work of the host affect all of them.

A process of JAX takes the memory that its entry needs when it starts, and holds it until it has measured: a group is as
large as the device's memory allows. Entries that measure the start of a process run alone, and so does, once more, what
ran out of memory.
"""

import compileall
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.suite.works import TORCH, Entry, Work

ROOT = Path(__file__).parents[2]
H200_GIB = 140.0
CONTEXT_GIB = 1.5  # that a process takes besides the memory of its arrays
SHORT_OF_MEMORY = "the device ran out of memory"
CACHES = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


class Job(NamedTuple):
    work: Work
    entry: Entry

    @property
    def name(self) -> str:
        return f"{self.work.name}:{self.entry.name}"

    @property
    def gib(self) -> float:
        """The device memory that it may take."""
        return self.entry.gib or self.work.gib


class Measurement(NamedTuple):
    job: Job
    seconds_to_first: float = float("nan")  # from the start of the process to the end of its first call
    report: dict[str, Any] = {}  # empty if it failed
    reason: str = ""  # why it failed


class Pool(NamedTuple):
    """How processes are started."""

    torch_python: str  # a Python that has PyTorch
    logs: Path  # a folder for what the processes print
    tiny: bool = False
    together: int = 6  # processes that start side by side
    limit: float = 150.0  # seconds to start, to compile, and to measure
    gib: float = H200_GIB  # the memory of the device

    def measure(self, jobs: Sequence[Job]) -> Iterator[Measurement]:
        """Measure all, and yield each when it has been."""
        self.logs.mkdir(parents=True, exist_ok=True)
        for package in ("mlax", "benchmarks"):  # as pip does for what is installed, such as the other libraries
            compileall.compile_dir(ROOT / package, quiet=2)
        short: list[Job] = []
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
            for group in self._groups(jobs):
                for measured in self._measure_group(group, caches):
                    if len(group) > 1 and measured.reason == SHORT_OF_MEMORY:
                        short.append(measured.job)
                    else:
                        yield measured
            for job in short:
                yield from self._measure_group([job], caches)

    def _measure_group(self, group: Sequence[Job], caches: str) -> Iterator[Measurement]:
        gib = 0.9 * self.gib if len(group) == 1 else None
        with contextlib.ExitStack() as stack:  # an interrupted run leaves no process behind
            workers = [_Worker(self, job, caches, gib or job.gib) for job in group]
            for worker in workers:
                stack.callback(worker.stop)
            ready = _compile_together([each for each in workers if each.job.entry.library == TORCH])
            others = [each for each in workers if each.job.name not in ready]
            built = {each.job.name: bool(each.wait_for("built")) for each in others}  # all: then none uses the CPU
            for work in dict.fromkeys(job.work.name for job in group):
                same = [each for each in workers if each.job.work.name == work]
                for worker in same:
                    if worker.job.name not in ready:
                        ready[worker.job.name] = built[worker.job.name] and bool(worker.compile())
                yield from _measure_in_turn([each for each in same if ready[each.job.name]])
                yield from (each.fail() for each in same if not ready[each.job.name])

    def _groups(self, jobs: Sequence[Job]) -> Iterator[list[Job]]:
        """Groups that fit, in order; small jobs come earlier, beside large ones that leave room."""
        waiting = list(jobs)
        while waiting:
            group = [waiting[0]]
            for job in waiting[1:]:
                if self._fits([*group, job]):
                    group.append(job)
            waiting = [job for job in waiting if job not in group]
            yield group

    def _fits(self, group: list[Job]) -> bool:
        is_alone = any(job.work.alone for job in group)
        taken = sum(job.gib + CONTEXT_GIB for job in group)
        return not is_alone and len(group) <= self.together and taken <= self.gib


def device_gib() -> float:
    """The memory of the GPU; of an H200 where there is none."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True)
        return float(answer.stdout.split()[0]) / 1024
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return H200_GIB


class _Worker:
    """The process of a job, and a thread that reads what it reports."""

    def __init__(self, pool: Pool, job: Job, caches: str, gib: float):
        python = pool.torch_python if job.entry.library == TORCH else sys.executable
        command = [python, "-m", "benchmarks.suite.entry", job.work.name, job.entry.name, *["--tiny"] * pool.tiny]
        self.log = pool.logs / f"{job.name.replace(':', '_').replace(' ', '_')}.txt"
        self.limit, self.job, self.start, self.first = pool.limit, job, time.perf_counter(), float("nan")
        self.is_stopped, self.is_late = False, False
        with open(self.log, "w") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_environment(job, python, caches, min(0.9, gib / pool.gib)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # to end its compilers with it
            )
        self.reports: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout:
            for line in self.process.stdout:
                report = json.loads(line)
                if report["state"] == "first":
                    self.first = time.perf_counter() - self.start
                self.reports.put(report)
        self.reports.put({"state": "ended"})

    def wait_for(self, state: str) -> dict[str, Any]:
        """The report of a state; empty if the process fails or takes too long."""
        end = (self.start if state == "built" else time.perf_counter()) + self.limit
        while True:
            try:
                report = self.reports.get(timeout=max(0.0, end - time.perf_counter()))
            except queue.Empty:
                self.is_late = True
                return {}
            if report["state"] in (state, "ended"):
                return report if report["state"] == state else {}

    def compile(self) -> dict[str, Any]:
        """Its report when it is ready to measure; empty if it fails."""
        self.tell("compile")
        return self.wait_for("ready")

    def repeat(self) -> bool:
        """Run a repetition; returns whether it succeeded."""
        self.tell("repeat")
        return bool(self.wait_for("repeated"))

    def end(self) -> Measurement:
        self.tell("end")
        report = self.wait_for("done")
        self.stop()
        return Measurement(self.job, self.first, report) if report else self.fail()

    def tell(self, line: str) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # it might have died meanwhile
            print(line, file=self.process.stdin, flush=True)

    def fail(self) -> Measurement:
        self.stop()
        reason = f"took more than {self.limit:g} s" if self.is_late else _find_reason(self.log)
        return Measurement(self.job, reason=reason)

    def stop(self) -> None:
        """End the process and those that it started, and wait for it, so that its memory is free."""
        if not self.is_stopped:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            assert self.process.stdin
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            self.is_stopped = True


def _compile_together(workers: Sequence[_Worker]) -> dict[str, bool]:
    """Whether each is ready to measure, by the name of its job."""
    built = {worker.job.name: bool(worker.wait_for("built")) for worker in workers}
    for worker in workers:
        if built[worker.job.name]:
            worker.tell("compile")
    return {name: built[name] and bool(worker.wait_for("ready")) for name, worker in zip(built, workers, strict=True)}


def _measure_in_turn(workers: list[_Worker]) -> Iterator[Measurement]:
    """Measure the libraries that do one work, a repetition of each in turn."""
    running = workers
    for _ in range(max((each.job.work.turns for each in workers), default=0)):
        running = [worker for worker in running if worker.repeat()]
    yield from (worker.end() if worker in running else worker.fail() for worker in workers)


def _find_reason(log: Path) -> str:
    """The last error in a log, or its last line."""
    text = log.read_text(errors="replace")
    if re.search(r"RESOURCE_EXHAUSTED|out of memory|OutOfMemory|OUT_OF_MEMORY", text):
        return SHORT_OF_MEMORY
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (errors or lines or ["it exited without an error message"])[-1]


def environment_for(python: str) -> dict[str, str]:
    """The environment without caches of programs, and with packages on PYTHONPATH for the same Python only."""
    settings = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    is_same = os.path.realpath(shutil.which(python) or python) == os.path.realpath(sys.executable)
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), is_same and settings.get("PYTHONPATH"))))
    return settings


def _environment(job: Job, python: str, caches: str, fraction: float) -> dict[str, str]:
    """With a share of the device's memory, and without caches of earlier runs.

    What measures a start has an empty folder for caches of its library, which its next entry finds filled.
    """
    settings = {**environment_for(python), "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{fraction:.3f}"}
    if job.work.alone:
        return settings | dict.fromkeys(CACHES, f"{caches}/{job.entry.library}")
    return settings | {"TORCHINDUCTOR_COMPILE_THREADS": "4"}  # or each starts a process for each core
