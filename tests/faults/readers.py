"""Readers beside a writer: each sees a whole step, bitwise, and no save fails because somebody read.

A child saves in a loop, keeps one step and deletes the one before; meanwhile this process opens the folder again and
again, lists it and restores.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

from mlax import train
from tests.asserts import unequal_leaves
from tests.faults.results import Result, example_tree, main


def run(trials=200, seed=0):
    draws, began, failures, steps = random.Random(seed), time.monotonic(), [], set()
    pipe, command = subprocess.PIPE, [sys.executable, "-m", "tests.faults.forks"]
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
    with tempfile.TemporaryDirectory(prefix="readers-") as folder, server:
        assert server.stdout.readline() == "ready\n"
        task = {"folder": folder, "seed": seed, "aim": None, "waits": False, "steps": 10**6, "keep": 1}
        server.stdin.write(json.dumps(task) + "\n")
        pid = int(server.stdout.readline().split()[1])
        while not train.Checkpoints(folder).steps():
            time.sleep(0.01)
        for trial in range(trials):
            time.sleep(draws.uniform(0, 0.01))
            faults = faults_of_reading(folder, seed, steps)
            if faults:
                failures.append(f"trial {trial}: {faults}")
        os.kill(pid, signal.SIGKILL)
        lines = list(iter(lambda: server.stdout.readline().strip(), "over"))
        failures += [line for line in lines if line.startswith("failed")]
        saved = max(int(line.split()[1]) for line in lines if line.startswith("saved"))
        if train.Checkpoints(folder).restore(example_tree(seed, 0)).step < saved:
            failures.append(f"step {saved} was acknowledged, and is lost")
        server.stdin.close()
    return Result.of(f"reading while {saved} steps are saved ({len(steps)} seen)", trials, failures, began)


def faults_of_reading(folder, seed, seen):
    reports = []
    checkpoints = train.Checkpoints(folder, report=reports.append)
    try:
        latest, restored = checkpoints.latest(), checkpoints.restore(example_tree(seed, 0))
    except Exception as failure:
        return [repr(failure)]
    seen.add(restored.step)
    faults = [f"latest was {latest}, and {restored.step} is restored"] * (restored.step < latest)
    faults += [f"step {restored.step} has other values"] * bool(
        unequal_leaves(restored.tree, example_tree(seed, restored.step))
    )
    return faults + reports


if __name__ == "__main__":
    main(run, 200)
