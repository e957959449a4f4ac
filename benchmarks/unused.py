"""Claim: compiled, a layer pays nothing for the parameters of the contract that it does not use.

    taskset -c 0 python benchmarks/unused.py [rounds]    # half a minute

The function adds a bias to 64 elements. It is called with two arguments, and with what a stateless layer is passed in
addition: `non_trainables=None`, `rng=None`, `inference_mode=False`, static or not. The last rows pass what it does not
use: a key, and a tree of 100 arrays.
"""

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from harness import interleave, print_table, seconds, verdict

LIMIT = 1.1
X, W = jnp.ones(64), {"bias": jnp.ones(64)}
TREE = {str(i): jnp.ones(4) for i in range(100)}


def two(x: Any, trainables: Any) -> Any:
    return x + trainables["bias"]


def five(x: Any, trainables: Any, non_trainables: Any = None, *, rng: Any = None, inference_mode: bool = False) -> Any:
    return x + trainables["bias"], non_trainables


def with_rng(x: Any, trainables: Any, non_trainables: Any = None, *, rng: Any = None) -> Any:
    return x + trainables["bias"]


def time_calls(call: Callable[[], Any], calls: int = 50) -> Callable[[], float]:
    def measure() -> float:
        call()
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls

    return measure


def make_calls() -> dict[str, dict[str, Callable[[], Any]]]:
    """The calls, eager and compiled; the others are compared with the first of each."""
    static = jax.jit(five, static_argnames="inference_mode")
    traced, plain, keyed = jax.jit(five), jax.jit(two), jax.jit(with_rng)
    key = jax.random.key(0)
    return {
        "eager": {
            "two arguments": lambda: two(X, W),
            "five, None and False": lambda: five(X, W, None, rng=None, inference_mode=False),
        },
        "compiled": {
            "two arguments": lambda: plain(X, W),
            "five, three of them omitted": lambda: traced(X, W),
            "five, None": lambda: traced(X, W, None, rng=None),
            "five, inference_mode=False static": lambda: static(X, W, None, rng=None, inference_mode=False),
            "five, inference_mode=False traced": lambda: traced(X, W, None, rng=None, inference_mode=False),
            "an unused key": lambda: keyed(X, W, None, rng=key),
            "100 unused arrays": lambda: keyed(X, W, TREE),
        },
    }


def main(rounds: int) -> None:
    rows = []
    for mode, calls in make_calls().items():
        measures = {name: time_calls(call) for name, call in calls.items()}
        interleave(measures, rounds=2)  # compiles
        times = {name: min(repeats) for name, repeats in interleave(measures, rounds=rounds).items()}
        for name, duration in times.items():
            ratio = duration / times["two arguments"]
            has_claim = mode == "compiled" and name in ("five, three of them omitted", "five, None")
            claim = verdict(f"at most {LIMIT} x", ratio <= LIMIT) if has_claim else ""
            rows.append((f"{mode}: {name}", seconds(duration), f"{ratio:.2f}", claim))
    print_table(f"One call: best of {rounds} rounds of 50", ("call", "time", "/ two", "claim"), rows)
    arguments = functools.partial(jax.jit(with_rng).lower, X, W)
    for name, lowered in (("None", arguments(None)), ("100 unused arrays", arguments(TREE))):
        count = lowered.as_text().split("@main(")[1].split(") ->")[0].count("%arg")
        print(f"arguments of the compiled program, with {name}: {count}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
