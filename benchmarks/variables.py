"""Claim: a compiled call over variables that are JAX arrays is faster than over NumPy arrays, many or few.

    taskset -c 0 python benchmarks/variables.py [rounds]    # half a minute

The work is a sum over all leaves. A NumPy argument leaves JAX's fast path: it is checked, and copied to the device, at
each call. On an accelerator that copy crosses a bus; here it stays in memory, which is the kindest case.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from side_by_side import in_turns, seconds, show, verdict

CASES = {"1 of 64": (1, 64), "100 of 64": (100, 64), "10 of 1,000,000": (10, 1_000_000)}


@jax.jit
def total(leaves: list[Any]) -> Any:
    return sum(leaf.sum() for leaf in leaves)


def timed(leaves: list[Any], calls: int) -> Callable[[], float]:
    def measure() -> float:
        jax.block_until_ready(total(leaves))  # another has just had the caches
        start = time.perf_counter()
        for _ in range(calls):
            out = total(leaves)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls

    return measure


def main(rounds: int) -> None:
    rows = []
    for name, (count, size) in CASES.items():
        given = [np.ones(size, np.float32) for _ in range(count)]
        calls = max(2, 50 // count)
        ways = {"JAX": timed([jax.device_put(leaf) for leaf in given], calls), "NumPy": timed(given, calls)}
        in_turns(ways, rounds=2)  # compiles
        found = {way: min(times) for way, times in in_turns(ways, rounds=rounds).items()}
        ratio = found["NumPy"] / found["JAX"]
        claim = verdict("NumPy is slower", ratio > 1)
        rows.append((name, seconds(found["JAX"]), seconds(found["NumPy"]), f"{ratio:.2f}", claim))
    show(f"A call over leaves: the best of {rounds} turns", ("leaves", "JAX", "NumPy", "ratio", "claim"), rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
