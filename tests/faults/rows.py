"""What every fault gives: a row of the table that `make faults` prints; and the trees that are saved meanwhile."""

import argparse
import json
from typing import NamedTuple

import ml_dtypes
import numpy as np


class Row(NamedTuple):
    name: str
    trials: int
    passed: int
    seconds: float
    failures: tuple[str, ...] = ()  # the first few, in words

    def __str__(self):
        return f"{self.name:60} {self.passed:5d} of {self.trials:5d}   {self.seconds:7.1f} s"


def values(seed, step, size=3000):
    """A tree of NumPy arrays, a pure function of its arguments."""
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


def bits(tree):
    """The leaves as bytes: equal if, and only if, the trees are equal to the bit."""
    if isinstance(tree, dict):
        return {name: bits(value) for name, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(bits(value) for value in tree)
    return (np.asarray(tree).dtype.name, np.shape(tree), np.asarray(tree).tobytes())


def main(run, trials):
    """`python -m tests.faults.<name> [--trials N] [--seed N]`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=trials)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = run(given.trials, given.seed)
    rows = [rows] if isinstance(rows, Row) else rows
    for row in rows:
        print(json.dumps(row) if given.json else row)
        for failure in () if given.json else row.failures:
            print("   ", failure)
    raise SystemExit(any(row.passed != row.trials for row in rows))
