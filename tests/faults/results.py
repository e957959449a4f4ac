"""Result: one line of the table that `make faults` prints; and the pytrees that the faults save."""

import argparse
import json
import time
from collections.abc import Sequence
from typing import NamedTuple, Self

import ml_dtypes
import numpy as np


class Result(NamedTuple):
    """How many trials of a fault passed."""

    name: str
    trials: int
    passed: int
    seconds: float
    failures: tuple[str, ...] = ()  # the first few, in words

    @classmethod
    def of(cls, name: str, trials: int, failures: Sequence[str], start: float) -> Self:
        """The result of trials that began at `start` on the monotonic clock."""
        return cls(name, trials, trials - len(failures), time.monotonic() - start, tuple(failures[:5]))

    def __str__(self):
        return f"{self.name:60} {self.passed:5d} of {self.trials:5d}   {self.seconds:7.1f} s"


def example_tree(seed, step, size=3000):
    """A pytree of NumPy arrays, a pure function of its arguments."""
    draws = np.random.default_rng((seed, step))
    mean = {name: draws.normal(size=(size // 100, 10)).astype(np.float32) for name in ("up", "down")}
    return {
        "step": np.int32(step),
        "trainables": {
            "up": draws.normal(size=(size, 4)).astype(np.float32),
            "down": draws.normal(size=(4, size)).astype(ml_dtypes.bfloat16),
            "empty": np.zeros((0, 3), np.float16),
        },
        "optimizer": (mean, draws.integers(0, 255, (size // 10,), np.uint8)),
    }


def main(run, trials):
    """`python -m tests.faults.<name> [--trials N] [--seed N]`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=trials)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = run(options.trials, options.seed)
    results = [results] if isinstance(results, Result) else results
    for result in results:
        print(json.dumps(result) if options.json else result)
        for failure in () if options.json else result.failures:
            print("   ", failure)
    raise SystemExit(any(result.passed != result.trials for result in results))
