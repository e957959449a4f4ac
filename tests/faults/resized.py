"""A training that resumes on other numbers of devices and processes.

The restored state is bitwise the one that was saved; every step sees the same examples; and the loss after 200 steps is
within 1e-5, relative, of a training that kept its devices.
"""

import tempfile
import time
from pathlib import Path

from tests.faults.children import ForkServer, examples_by_step, launch, metrics_by_step
from tests.faults.results import Result, main

STEPS, TOLERANCE = 200, 1e-5
ROUTES = {
    "8 -> 4 -> 1 -> 8 devices": ((1, 8), (1, 4), (1, 1), (1, 8)),
    "2 -> 1 processes": ((2, 2), (1, 4)),
    "1 -> 2 processes": ((1, 4), (2, 4)),
}


def run(trials=1, seed=0, routes=tuple(ROUTES), steps=STEPS):
    rows = []
    with tempfile.TemporaryDirectory(prefix="resized-") as parent, ForkServer() as fork:
        whole = Path(parent) / "whole"
        assert train(fork, whole, 1, 8, steps, fsdp=False).wait() == 0
        for name in routes:
            began, failures = time.monotonic(), []
            for trial in range(trials):
                folder = Path(parent) / f"{name}-{trial}".replace(" ", "").replace(">", "")
                faults, off = faults_of(fork, folder, ROUTES[name], whole, steps, fsdp=trial % 2 == 0)
                if faults:
                    failures.append(f"trial {trial}: {faults}")
            title = f"{name} (loss off by {off:.1e})"
            rows.append(Result.of(title, trials, failures, began))
    return rows


def train(fork, folder, processes, devices, steps, fsdp):
    argv = ("--run", folder, "--steps", steps, "--digest", "--save-every", 1000, "--evaluate-every", 1000)
    argv += ("--fsdp",) if fsdp else ()
    if processes == 1:
        return fork(*argv, "--devices", devices)
    return launch(*argv, options=("-n", processes, "--devices", devices, "--restarts", 0))


def faults_of(fork, folder, route, whole, steps, fsdp):
    left, faults = None, []
    for number, (processes, devices) in enumerate(route, 1):
        child = train(fork, folder, processes, devices, steps * number // len(route), fsdp)
        status = child.wait()
        if status:
            return [f"{processes} processes of {devices} devices ended with {status}: {child.lines[-8:]}"], float("nan")
        restored = next((line.split()[-1] for line in child.lines if "restored " in line), None)
        faults += [f"part {number} restored another state than was left"] * (restored != left)
        left = next(line.split()[-1] for line in child.lines if "left " in line and len(line.split()[-1]) == 64)
    mine, theirs = examples_by_step(folder), examples_by_step(whole)
    faults += ["some step saw other examples"] * (mine != theirs)
    mine, theirs = metrics_by_step(folder)[steps]["loss"], metrics_by_step(whole)[steps]["loss"]
    off = abs(mine / theirs - 1)
    return faults + [f"the loss is {mine}, not {theirs}"] * (off > TOLERANCE), off


if __name__ == "__main__":
    main(run, 1)
