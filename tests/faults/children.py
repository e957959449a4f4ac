"""Trainings as child processes: forked from a server that has everything loaded, or launched with `mlax launch`."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.processes import ROOT, child_environment

SCRIPT = str(ROOT / "tests" / "faults" / "training.py")


class Child:
    """A training: the lines that it prints, as they come, and its exit status."""

    def __init__(self, pid, lines, status):
        self.pid, self._lines, self._status = pid, lines, status
        self.lines = []
        self._changed = threading.Condition()
        self._over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with self._lines:
            for line in self._lines:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait_for(self, word, seconds=240):
        """Wait for a line that contains `word`; False if the process exits without one."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or any(word in line for line in self.lines), seconds)
            return any(word in line for line in self.lines)

    def send(self, number):
        os.kill(self.pid, number)

    def wait(self, seconds=240):
        """The exit status, negative for a signal."""
        status = self._status(seconds)
        self._reader.join(10)
        return status

    def last(self, prefix):
        """The last line with this prefix, or ""."""
        return next((line for line in reversed(self.lines) if line.startswith(prefix)), "")


class ForkServer:
    """Starts trainings of one process by forking, which is fast."""

    def __enter__(self):
        self.server = subprocess.Popen(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.faults.children"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=child_environment(),
            cwd=ROOT,
        )
        assert self.server.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_):
        self.server.stdin.close()
        self.server.wait()
        self.server.stdout.close()

    def __call__(self, *argv):
        reading, writing = os.pipe()
        task = {"argv": list(map(str, argv)), "output": f"/proc/{os.getpid()}/fd/{writing}"}
        self.server.stdin.write(json.dumps(task) + "\n")
        pid = int(self.server.stdout.readline())
        os.close(writing)

        def status(seconds):
            timer = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
            timer.start()
            try:
                self.server.stdin.write("reap\n")
                return int(self.server.stdout.readline())
            finally:
                timer.cancel()

        return Child(pid, os.fdopen(reading), status)


def launch(*argv, options=()):
    """A training of several processes under `mlax launch`."""
    popen = subprocess.Popen(
        [sys.executable, "-m", "mlax", "launch", *map(str, options), SCRIPT, *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=child_environment(),
        cwd=ROOT,
    )

    def status(seconds):
        try:
            return popen.wait(seconds)
        except subprocess.TimeoutExpired:
            popen.kill()
            return popen.wait()

    return Child(popen.pid, popen.stdout, status)


def saved_steps(run):
    from mlax import train

    return train.Checkpoints(Path(run) / "checkpoints").steps()


def weight_bytes(run):
    """The bytes of the final weights of a run."""
    return (Path(run) / "last.safetensors").read_bytes()


def metrics_by_step(run):
    """The metrics that a run logged, by step."""
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "loss" in line}


def examples_by_step(run):
    """What identifies the examples that each step saw."""
    return {step: (record["mean_id"], record["codes"]) for step, record in metrics_by_step(run).items()}


def serve():
    from tests.faults import training

    os.write(1, b"ready\n")
    for line in sys.stdin:
        task = json.loads(line)
        output = os.open(task["output"], os.O_WRONLY)
        pid = os.fork()
        if pid == 0:
            _train(training, task["argv"], output)
        os.close(output)
        os.write(1, f"{pid}\n".encode())
        sys.stdin.readline()  # until then a dead child keeps its pid, so that no kill hits another process
        _, status = os.waitpid(pid, 0)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _train(training, argv, output):
    status = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        sys.argv = [SCRIPT, *argv]
        training.main(argv)
        status = 0
    except SystemExit as exit:
        status = exit.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve()
