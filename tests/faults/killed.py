"""kill -9 at any moment of a save: the last acknowledged step, or a later one, is restored bitwise.

A child saves in a loop and acknowledges each step on a pipe. Half of the kills come at a random time; half are aimed
at one system call: before it, after it, or halfway through a write. Every fifth trial starts in an empty folder; the
others continue in what the previous kill has left. Reading deletes none of that, and the next save all of it.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from mlax import train
from tests.asserts import unequal_leaves
from tests.faults.forks import AIMS
from tests.faults.results import Result, example_tree, main


def run(trials=200, seed=0):
    draws, began, failures = random.Random(seed), time.monotonic(), []
    parent = tempfile.mkdtemp(prefix="killed-")
    pipe, command = subprocess.PIPE, [sys.executable, "-m", "tests.faults.forks"]
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
    try:
        assert server.stdout.readline() == "ready\n"
        for trial in range(trials):
            if trial % 5 == 0:
                folder, saved = os.path.join(parent, str(trial)), 0
            aim, waits = None, draws.random() < 0.5
            if draws.random() < 0.5:
                aim = [draws.choice(AIMS), draws.choice(["before", "during", "after"]), draws.randint(1, 25)]
            task = {"folder": folder, "seed": seed, "aim": aim, "waits": waits, "steps": 6 if aim else 10**6}
            lines = one_kill(server, task, draws.uniform(0, 0.08))
            faults = [line for line in lines if line.startswith("failed")]
            saved = max([saved] + [int(line.split()[1]) for line in lines if line.startswith("saved")])
            faults += faults_in(folder, seed, saved)
            faults += leftovers_after_a_save(folder, seed) if trial % 5 == 4 else []
            if faults:
                failures.append(f"trial {trial}, {task}, acknowledged {saved}: {faults}")
    finally:
        server.stdin.close()
        server.wait()
        server.stdout.close()
        shutil.rmtree(parent, ignore_errors=True)
    return Result.of("kill -9 while saving", trials, failures, began)


def one_kill(server, task, delay):
    """What the child printed before it was killed."""
    server.stdin.write(json.dumps(task) + "\n")
    pid = int(server.stdout.readline().split()[1])
    if task["aim"] is None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)  # it never exits by itself, so the pid is still its own
    lines = []
    while (line := server.stdout.readline().strip()) != "over":
        lines.append(line)
    return lines


def faults_in(folder, seed, saved):
    """What is wrong with the folder after the kill."""
    reports, faults, before = [], [], listing(folder)
    checkpoints = train.Checkpoints(folder, report=reports.append)
    for step in (None, *checkpoints.steps()):
        try:
            restored = checkpoints.restore(example_tree(seed, 0), step=step)
        except FileNotFoundError as failure:
            return [str(failure)] if saved else []
        except Exception as failure:
            faults.append(f"step {step}: {failure!r}")
            continue
        if step is None and restored.step < saved:
            faults.append(f"step {restored.step} is older than the acknowledged one")
        if unequal_leaves(restored.tree, example_tree(seed, restored.step)):
            faults.append(f"step {restored.step} has other values")
    faults += [f"reading changed {before} to {listing(folder)}"] * (listing(folder) != before)
    return faults + reports


def leftovers_after_a_save(folder, seed):
    checkpoints = train.Checkpoints(folder, keep=2)
    step = (checkpoints.latest() or 0) + 1
    checkpoints.save(step, example_tree(seed, step))
    checkpoints.wait()
    left = [name for name in listing(folder) if name.startswith(".") and name != ".lock"]
    return [f"left over: {left}"] * bool(left)


def listing(folder):
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


if __name__ == "__main__":
    main(run, 200)
