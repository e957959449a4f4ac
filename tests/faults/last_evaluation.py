"""SIGTERM in the last evaluation: the run is not called finished, and the same command makes the evaluation up."""

import random
import signal
import tempfile
import time
from pathlib import Path

from mlax.train import read_records
from tests.faults.children import ForkServer, weight_bytes
from tests.faults.results import Result, main
from tests.faults.terminated import TERMINATED

STEPS = 20
DRAG = ("--drag", 0.4, "--drag-phase", "evaluation")


def run(trials=4, seed=0):
    draws, began, failures = random.Random(seed), time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="last-") as parent, ForkServer() as fork:
        whole = Path(parent) / "whole"
        assert fork("--run", whole, "--steps", STEPS).wait() == 0
        for trial in range(trials):
            folder = Path(parent) / f"trial-{trial}"
            faults = interrupt(fork, folder, draws)
            status = fork("--run", folder, "--steps", STEPS).wait()
            faults += [f"the second run ended with {status}"] * (status != 0)
            faults += [f"the scores are {scores(folder)}, not {scores(whole)}"] * (scores(folder) != scores(whole))
            faults += ["the weights differ"] * (not faults and weight_bytes(folder) != weight_bytes(whole))
            if faults:
                failures.append(f"trial {trial}: {faults}")
    return Result.of("SIGTERM in the last evaluation, and resume", trials, failures, began)


def interrupt(fork, folder, draws):
    child = fork("--run", folder, "--steps", STEPS, "--say", *DRAG)
    child.wait_for(f"at {STEPS} evaluation")
    time.sleep(draws.uniform(0, 0.5))
    child.send(signal.SIGTERM)
    status = child.wait()
    faults = [f"the first run ended with {status}"] * (status != TERMINATED)
    return faults + [f"it says {line}" for line in child.lines if "finished" in line]


def scores(run):
    """The evaluations that a run has logged."""
    records = read_records(run / "metrics.jsonl")
    return {record["step"]: record["evaluation"] for record in records if "evaluation" in record}


if __name__ == "__main__":
    main(run, 4)
