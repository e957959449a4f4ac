"""Claim: a compiled call is faster with variables that are JAX arrays than with NumPy arrays, few or many.

    taskset -c 0 python benchmarks/variables.py [rounds]    # half a minute

The work is a sum over all leaves. A NumPy argument leaves JAX's fast path: it is checked, and copied to the device, at
each call. On an accelerator that copy crosses a bus; here it stays in memory, which is the best case for NumPy.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from harness import interleave, print_table, seconds, verdict

CASES = {"1 of 64": (1, 64), "100 of 64": (100, 64), "10 of 1,000,000": (10, 1_000_000)}


@jax.jit
def total(leaves: list[Any]) -> Any:
    return sum(leaf.sum() for leaf in leaves)


def time_calls(leaves: list[Any], calls: int) -> Callable[[], float]:
    def measure() -> float:
        jax.block_until_ready(total(leaves))  # warms the caches
        start = time.perf_counter()
        for _ in range(calls):
            out = total(leaves)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls

    return measure


def main(rounds: int) -> None:
    rows = []
    for name, (count, size) in CASES.items():
        arrays = [np.ones(size, np.float32) for _ in range(count)]
        calls = max(2, 50 // count)
        measurements = {
            "JAX": time_calls([jax.device_put(leaf) for leaf in arrays], calls),
            "NumPy": time_calls(arrays, calls),
        }
        interleave(measurements, rounds=2)  # compiles
        times = {kind: min(repeats) for kind, repeats in interleave(measurements, rounds=rounds).items()}
        ratio = times["NumPy"] / times["JAX"]
        claim = verdict("NumPy is slower", ratio > 1)
        rows.append((name, seconds(times["JAX"]), seconds(times["NumPy"]), f"{ratio:.2f}", claim))
    print_table(f"One call: best of {rounds} rounds", ("leaves", "JAX", "NumPy", "ratio", "claim"), rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
