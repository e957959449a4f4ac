"""kill -9 anywhere in a training, within epochs and within accumulation, and up to three resumes.

The final weights are bitwise equal to those of an uninterrupted run, and each step has seen the same examples.
"""

import functools
import random
import signal
import tempfile
import time
from pathlib import Path

from tests.faults.children import ForkServer, examples_by_step, metrics_by_step, weight_bytes
from tests.faults.results import Result, main

STEPS = 60


def run(trials=20, seed=0, kills=3):
    draws, began, failures = random.Random(seed), time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="resumed-") as parent, ForkServer() as fork:
        whole = Path(parent) / "whole"
        train_whole(fork, whole)  # and compile
        seconds = functools.cache(lambda: train_whole(fork, Path(parent) / "again"))
        for trial in range(trials):
            folder = Path(parent) / f"trial-{trial}"
            cuts = [kill_once(fork, folder, draws, seconds) for _ in range(draws.randint(1, kills))]
            child = fork("--run", folder, "--steps", STEPS)
            status = child.wait()
            faults = [f"ended with {status}: {child.lines[-5:]}"] if status else faults_in(folder, whole)
            if faults:
                failures.append(f"trial {trial}, killed {cuts}: {faults}")
    return [Result.of("kill -9 and resume", trials, failures, began)]


def train_whole(fork, folder):
    """Train without interruption; returns the seconds that it took."""
    began = time.monotonic()
    assert fork("--run", folder, "--steps", STEPS).wait() == 0
    return time.monotonic() - began


def kill_once(fork, folder, draws, seconds):
    """Kill a training after a random step, or at a random time; returns the last line it printed."""
    child = fork("--run", folder, "--steps", STEPS, "--say")
    if draws.random() < 0.6:
        child.wait_for(f"at {draws.randrange(STEPS)} ")
        time.sleep(draws.uniform(0, 0.02))
    else:
        time.sleep(draws.uniform(0.3, 1) * seconds())
    child.send(signal.SIGKILL)
    child.wait()
    return child.last("at ")


def faults_in(folder, whole):
    faults = [] if weight_bytes(folder) == weight_bytes(whole) else ["the weights differ"]
    mine, theirs = examples_by_step(folder), examples_by_step(whole)
    faults += [f"step {step} saw other examples" for step in mine if mine[step] != theirs[step]]
    losses = {step: record["loss"] for step, record in metrics_by_step(whole).items()}
    faults += [
        f"step {s} had another loss" for s, record in metrics_by_step(folder).items() if record["loss"] != losses[s]
    ]
    return faults


if __name__ == "__main__":
    main(run, 20)
