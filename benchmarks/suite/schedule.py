"""Run entries in processes of their own: several compile side by side, then each measures while the others idle.

A process of JAX takes the memory that its work needs when it starts, and holds it until it has measured: a group is as
large as the device's memory allows. Entries that measure the start of a process run alone.
"""

import json
import os
import queue
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
CONTEXT_GIB = 2.0  # that a process takes besides the memory of its arrays


class Job(NamedTuple):
    work: Work
    entry: Entry

    @property
    def name(self) -> str:
        return f"{self.work.name}:{self.entry.name}"


class Measurement(NamedTuple):
    job: Job
    seconds_to_first: float = float("nan")  # from the start of the process to the end of its first call
    report: dict[str, Any] = {}  # empty if it failed


class Pool(NamedTuple):
    """How processes are started."""

    torch_python: str  # a Python that has PyTorch
    logs: Path  # a folder for what the processes print
    tiny: bool = False
    together: int = 6  # processes that compile side by side
    limit: float = 150.0  # seconds to compile, and to measure
    gib: float = H200_GIB  # the memory of the device

    def measure(self, jobs: Sequence[Job]) -> Iterator[Measurement]:
        """Measure all, and yield each when it has been."""
        self.logs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as caches:
            for group in self._groups(jobs):
                workers = [_Worker(self, job, caches) for job in group]
                compiled = [worker.wait_for("ready") for worker in workers]
                for worker, ready in zip(workers, compiled, strict=True):
                    yield worker.measure() if ready else worker.stop()

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
        taken = sum(job.work.gib + CONTEXT_GIB for job in group)
        return not is_alone and len(group) <= self.together and taken <= self.gib


def device_gib() -> float:
    """The memory of the GPU; of an H200 where there is none."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return H200_GIB
    return float(answer.stdout.split()[0]) / 1024


class _Worker:
    """The process of a job, and a thread that reads what it reports."""

    def __init__(self, pool: Pool, job: Job, caches: str):
        python = pool.torch_python if job.entry.library == TORCH else sys.executable
        command = [python, "-m", "benchmarks.suite.entry", job.work.name, job.entry.name, *["--tiny"] * pool.tiny]
        log = pool.logs / f"{job.name.replace(':', '_').replace(' ', '_')}.txt"
        self.limit, self.job, self.start, self.first = pool.limit, job, time.perf_counter(), float("nan")
        with open(log, "w") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_environment(job, caches, pool.gib),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.reports: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            report = json.loads(line)
            if report["state"] == "first":
                self.first = time.perf_counter() - self.start
            self.reports.put(report)
        self.reports.put({"state": "ended"})

    def wait_for(self, state: str) -> dict[str, Any]:
        """The report of a state; empty if the process fails or takes too long."""
        end = (self.start if state == "ready" else time.perf_counter()) + self.limit
        while True:
            try:
                report = self.reports.get(timeout=max(0.0, end - time.perf_counter()))
            except queue.Empty:
                return {}
            if report["state"] in (state, "ended"):
                return report if report["state"] == state else {}

    def measure(self) -> Measurement:
        assert self.process.stdin
        print("go", file=self.process.stdin, flush=True)
        report = self.wait_for("done")
        self.stop()
        return Measurement(self.job, self.first, report)

    def stop(self) -> Measurement:
        """End the process, and wait for it, so that its memory is free."""
        self.process.kill()
        self.process.wait()
        return Measurement(self.job)


def _environment(job: Job, caches: str, gib: float) -> dict[str, str]:
    """With a share of the device's memory, and without caches of earlier runs.

    What measures a start has an empty folder for caches of its library, which its next entry finds filled.
    """
    settings = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), settings.get("PYTHONPATH"))))
    settings["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{min(0.9, job.work.gib / gib):.3f}"
    if job.work.alone:
        folder = f"{caches}/{job.entry.library}"
        return settings | dict.fromkeys(("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), folder)
    return settings | {"TORCHINDUCTOR_COMPILE_THREADS": "4"}  # or each starts a process for each core
