"""One of two processes is killed, stopped or sleeps: it is named, all exit, and the restart reaches the same weights.

If their supervisor is killed, they save and exit.
"""

import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tests.faults.children import launch, saved_steps, weight_bytes
from tests.faults.results import Result, main

WITHIN = 30.0  # seconds from the fault until all have exited
STEPS = 24
OPTIONS = ("-n", 2, "--devices", 2, "--restarts", 1)
FAULTS = {"SIGKILL": signal.SIGKILL.value, "SIGSTOP": signal.SIGSTOP.value, "sleep in Python": "sleep"}
PHASES = ("step", "after a step", "waiting for data", "evaluation")


def run(trials=2, seed=0, faults=tuple(FAULTS), hang=20):
    draws, rows = random.Random(seed), []
    with tempfile.TemporaryDirectory(prefix="hung-") as parent:
        whole = Path(parent) / "whole"
        child = launch("--run", whole, "--steps", STEPS, options=OPTIONS)
        assert child.wait() == 0, child.lines
        for name in faults:
            began, failures, slowest = time.monotonic(), [], 0.0
            for trial in range(trials):
                process, at, phase = draws.randrange(2), draws.randint(1, STEPS - 2), draws.choice(PHASES)
                at = 10 if phase == "evaluation" else at
                what = ("--process", process, "--at", at, "--phase", phase, "--fault", FAULTS[name])
                folder = Path(parent) / f"{name}-{trial}".replace(" ", "-")
                wrong, seconds = faults_of(folder, whole, process, what, hang)
                slowest = max(slowest, seconds)
                if wrong:
                    failures.append(f"trial {trial}, {what}: {wrong}")
            title = f"{name} of one of two (slowest exit {slowest:.1f} s)"
            rows.append(Result.of(title, trials, failures, began))
    return [*rows, supervisor_killed(trials, seed)]


def supervisor_killed(trials, seed):
    draws, began, failures, slowest = random.Random(seed), time.monotonic(), [], 0.0
    for trial in range(trials):
        with tempfile.TemporaryDirectory(prefix="orphans-") as parent:
            folder, at = Path(parent) / "run", draws.randint(1, 20)
            argv = ("--run", folder, "--steps", 100_000, "--say", "--save-every", 5000, "--evaluate-every", 5000)
            child = launch(*argv, options=OPTIONS)
            assert child.wait_for(f"at {at} step"), child.lines
            listed = subprocess.run(["pgrep", "-P", str(child.pid)], capture_output=True, text=True, check=True)
            began_to_end = time.monotonic()
            child.send(signal.SIGKILL)
            child.wait()
            while (
                there := [p for p in listed.stdout.split() if alive(p)]
            ) and time.monotonic() - began_to_end < WITHIN:
                time.sleep(0.05)
            slowest = max(slowest, time.monotonic() - began_to_end)
            wrong = [f"processes {there} are still there"] * bool(there)
            wrong += [f"step {at} was done, but saved are {saved_steps(folder)}"] * (
                max(saved_steps(folder), default=0) < at
            )
            if wrong:
                failures.append(f"trial {trial}: {wrong}")
    title = f"SIGKILL of the supervisor (slowest exit {slowest:.1f} s)"
    return Result.of(title, trials, failures, began)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def faults_of(folder, whole, process, what, hang):
    argv = ("--run", folder, "--steps", STEPS, *what)
    child = launch(*argv, options=(*OPTIONS, "--hang", hang))
    happened = Path(f"{folder}.happened")
    while not happened.exists() and child._reader.is_alive():
        time.sleep(0.05)
    began = time.monotonic()
    child.wait_for("mlax launch: ")  # by then all have exited
    seconds = time.monotonic() - began
    status = child.wait()
    reports = [line for line in child.lines if line.startswith("mlax launch: ")]
    wrong = [f"the exit status is {status}: {child.lines[-20:]}"] * (status != 0)
    wrong += [f"it took {seconds:.1f} s"] * (seconds > WITHIN)
    wrong += [f"it reports {reports}"] * (not reports or f"process {process} (pid" not in reports[0].split(";")[0][:60])
    if not wrong and weight_bytes(folder) != weight_bytes(whole):
        wrong = ["the weights differ"]
    return wrong, seconds


if __name__ == "__main__":
    main(run, 2)
