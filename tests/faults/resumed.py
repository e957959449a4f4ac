"""kill -9 anywhere in a training, in the middle of epochs and of accumulations, and resumed up to three times.

The weights at the end are those of the unbroken run to the bit, and each step has seen the same examples.
"""

import random
import signal
import tempfile
import time
from pathlib import Path

from tests.faults.children import Forks, records, seen, weights
from tests.faults.rows import Row, main

STEPS = 60


def run(trials=20, seed=0):
    draws, began, failures = random.Random(seed), time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="resumed-") as parent, Forks() as fork:
        whole, seconds = Path(parent) / "whole", 0.0
        for _ in range(2):  # the first one compiles
            begun = time.monotonic()
            assert fork("--run", whole, "--steps", STEPS).ended() == 0
            seconds, whole = time.monotonic() - begun, Path(parent) / "again"
        whole = Path(parent) / "whole"
        for trial in range(trials):
            folder = Path(parent) / f"trial-{trial}"
            cuts = [cut(fork, folder, draws, seconds) for _ in range(draws.randint(1, 3))]
            child = fork("--run", folder, "--steps", STEPS)
            status = child.ended()
            faults = [f"ended with {status}: {child.said[-5:]}"] if status else faults_in(folder, whole)
            if faults:
                failures.append(f"trial {trial}, cut {cuts}: {faults}")
    return [Row("kill -9 and resume", trials, trials - len(failures), time.monotonic() - began, tuple(failures[:5]))]


def cut(fork, folder, draws, seconds):
    """Kill a training: after a random step, or at a random time. Gives where that was."""
    child = fork("--run", folder, "--steps", STEPS, "--say")
    if draws.random() < 0.6:
        child.wait_for(f"at {draws.randrange(STEPS)} ")
        time.sleep(draws.uniform(0, 0.02))
    else:
        time.sleep(draws.uniform(0.3, 1) * seconds)
    child.send(signal.SIGKILL)
    child.ended()
    return child.last("at ")


def faults_in(folder, whole):
    faults = [] if weights(folder) == weights(whole) else ["the weights are others"]
    mine, theirs = seen(folder), seen(whole)
    faults += [f"step {step} saw other examples" for step in mine if mine[step] != theirs[step]]
    losses = {step: record["loss"] for step, record in records(whole).items()}
    faults += [f"step {s} had another loss" for s, record in records(folder).items() if record["loss"] != losses[s]]
    return faults


if __name__ == "__main__":
    main(run, 20)
