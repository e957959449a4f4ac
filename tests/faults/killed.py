"""kill -9 at any moment of a save: the last acknowledged step, or a later one, restores to the bit.

A child saves in a loop and acknowledges each step on a pipe. Half of the kills come at a random time, half are aimed
at one call of the operating system: before it, after it, or with half of a write done. Every fifth trial begins in a
fresh folder; the others go on in what the kill before has left.
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
from tests.faults.forks import AIMS
from tests.faults.rows import Row, bits, main, values


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
            said = one_kill(server, task, draws.uniform(0, 0.08))
            faults = [word for word in said if word.startswith("failed")]
            saved = max([saved] + [int(word.split()[1]) for word in said if word.startswith("saved")])
            faults += faults_in(folder, seed, saved)
            if faults:
                failures.append(f"trial {trial}, {task}, acknowledged {saved}: {faults}")
    finally:
        server.stdin.close()
        server.wait()
        server.stdout.close()
        shutil.rmtree(parent, ignore_errors=True)
    return Row("kill -9 while saving", trials, trials - len(failures), time.monotonic() - began, tuple(failures[:5]))


def one_kill(server, task, delay):
    """What the child said before it was killed."""
    server.stdin.write(json.dumps(task) + "\n")
    pid = int(server.stdout.readline().split()[1])
    if task["aim"] is None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)  # it never ends by itself, so the number is still its own
    said = []
    while (line := server.stdout.readline().strip()) != "over":
        said.append(line)
    return said


def faults_in(folder, seed, saved):
    """What is wrong with the folder after the kill."""
    words = []
    checkpoints = train.Checkpoints(folder, report=words.append)
    remains = [name for name in os.listdir(folder) if name.startswith(".")] if os.path.isdir(folder) else []
    faults = [f"remains: {remains}"] if remains else []
    for step in (None, *checkpoints.steps()):
        try:
            restored = checkpoints.restore(values(seed, 0), step=step)
        except FileNotFoundError as failure:
            return faults + ([str(failure)] if saved else [])
        except Exception as failure:
            faults.append(f"step {step}: {failure!r}")
            continue
        if step is None and restored.step < saved:
            faults.append(f"step {restored.step} is older than the acknowledged one")
        if bits(restored.tree) != bits(values(seed, restored.step)):
            faults.append(f"step {restored.step} has other values")
    return faults + words


if __name__ == "__main__":
    main(run, 200)
