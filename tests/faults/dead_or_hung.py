"""One of two processes is killed, stopped or sleeps: it is named, all end, and the restart reaches the same weights.

If their supervisor is killed, they save and end.
"""

import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tests.faults.children import launch, steps_saved, weights
from tests.faults.rows import Row, main

WITHIN = 30.0  # seconds from the fault to the end of all
STEPS = 24
OPTIONS = ("-n", 2, "--devices", 2, "--restarts", 1)
FAULTS = {"SIGKILL": signal.SIGKILL.value, "SIGSTOP": signal.SIGSTOP.value, "sleep in Python": "sleep"}
PHASES = ("step", "after a step", "waiting for data", "evaluation")


def run(trials=2, seed=0, faults=tuple(FAULTS), hang=20):
    draws, rows = random.Random(seed), []
    with tempfile.TemporaryDirectory(prefix="hung-") as parent:
        whole = Path(parent) / "whole"
        child = launch("--run", whole, "--steps", STEPS, options=OPTIONS)
        assert child.ended() == 0, child.said
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
            title = f"{name} of one of two (slowest end {slowest:.1f} s)"
            rows.append(Row(title, trials, trials - len(failures), time.monotonic() - began, tuple(failures[:5])))
    return [*rows, supervisor_killed(trials, seed)]


def supervisor_killed(trials, seed):
    draws, began, failures, slowest = random.Random(seed), time.monotonic(), [], 0.0
    for trial in range(trials):
        with tempfile.TemporaryDirectory(prefix="orphans-") as parent:
            folder, at = Path(parent) / "run", draws.randint(1, 20)
            argv = ("--run", folder, "--steps", 100_000, "--say", "--save-every", 5000, "--evaluate-every", 5000)
            child = launch(*argv, options=OPTIONS)
            assert child.wait_for(f"at {at} step"), child.said
            listed = subprocess.run(["pgrep", "-P", str(child.pid)], capture_output=True, text=True, check=True)
            began_to_end = time.monotonic()
            child.send(signal.SIGKILL)
            child.ended()
            while (
                there := [p for p in listed.stdout.split() if alive(p)]
            ) and time.monotonic() - began_to_end < WITHIN:
                time.sleep(0.05)
            slowest = max(slowest, time.monotonic() - began_to_end)
            wrong = [f"processes {there} are still there"] * bool(there)
            wrong += [f"step {at} was done, but saved are {steps_saved(folder)}"] * (
                max(steps_saved(folder), default=0) < at
            )
            if wrong:
                failures.append(f"trial {trial}: {wrong}")
    title = f"SIGKILL of the supervisor (slowest end {slowest:.1f} s)"
    return Row(title, trials, trials - len(failures), time.monotonic() - began, tuple(failures[:5]))


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
    child.wait_for("mlax launch: ")  # all are ended when it says so
    seconds = time.monotonic() - began
    status = child.ended()
    words = [line for line in child.said if line.startswith("mlax launch: ")]
    wrong = [f"the exit status is {status}: {child.said[-20:]}"] * (status != 0)
    wrong += [f"it took {seconds:.1f} s"] * (seconds > WITHIN)
    wrong += [f"the words are {words}"] * (not words or f"process {process} (pid" not in words[0].split(";")[0][:60])
    if not wrong and weights(folder) != weights(whole):
        wrong = ["the weights are others"]
    return wrong, seconds


if __name__ == "__main__":
    main(run, 2)
