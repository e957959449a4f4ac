"""Claim: compiled, a layer pays nothing for the parameters of the contract that it does not use.

    taskset -c 0 python benchmarks/unused.py [rounds]    # half a minute

The function adds a bias to 64 numbers. It is called as a function of two arguments, and with what a stateless layer is
given besides: `non_trainables=None`, `rng=None`, `inference_mode=False`, declared static or not. The last rows give it
what it does not use: a key, and a tree of 100 arrays.
"""

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from side_by_side import in_turns, seconds, show, verdict

LIMIT = 1.1
X, W = jnp.ones(64), {"bias": jnp.ones(64)}
TREE = {str(place): jnp.ones(4) for place in range(100)}


def two(x: Any, trainables: Any) -> Any:
    return x + trainables["bias"]


def five(x: Any, trainables: Any, non_trainables: Any = None, *, rng: Any = None, inference_mode: bool = False) -> Any:
    return x + trainables["bias"], non_trainables


def given(x: Any, trainables: Any, non_trainables: Any = None, *, rng: Any = None) -> Any:
    return x + trainables["bias"]


def timed(call: Callable[[], Any], calls: int = 50) -> Callable[[], float]:
    def measure() -> float:
        call()
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls

    return measure


def ways() -> dict[str, dict[str, Callable[[], Any]]]:
    """The calls, eager and compiled; the first of each is what the others are compared with."""
    static = jax.jit(five, static_argnames="inference_mode")
    traced, plain, keyed = jax.jit(five), jax.jit(two), jax.jit(given)
    key = jax.random.key(0)
    return {
        "eager": {
            "two arguments": lambda: two(X, W),
            "five, None and False": lambda: five(X, W, None, rng=None, inference_mode=False),
        },
        "compiled": {
            "two arguments": lambda: plain(X, W),
            "five, three of them left out": lambda: traced(X, W),
            "five, None": lambda: traced(X, W, None, rng=None),
            "five, inference_mode=False static": lambda: static(X, W, None, rng=None, inference_mode=False),
            "five, inference_mode=False traced": lambda: traced(X, W, None, rng=None, inference_mode=False),
            "an unused key": lambda: keyed(X, W, None, rng=key),
            "100 unused arrays": lambda: keyed(X, W, TREE),
        },
    }


def main(rounds: int) -> None:
    rows = []
    for mode, calls in ways().items():
        measures = {name: timed(call) for name, call in calls.items()}
        in_turns(measures, rounds=2)  # compiles
        found = {name: min(times) for name, times in in_turns(measures, rounds=rounds).items()}
        for name, duration in found.items():
            ratio = duration / found["two arguments"]
            claimed = mode == "compiled" and name in ("five, three of them left out", "five, None")
            claim = verdict(f"at most {LIMIT} x", ratio <= LIMIT) if claimed else ""
            rows.append((f"{mode}: {name}", seconds(duration), f"{ratio:.2f}", claim))
    show(f"One call: the best of {rounds} turns of 50", ("call", "time", "/ two", "claim"), rows)
    arguments = functools.partial(jax.jit(given).lower, X, W)
    for name, lowered in (("None", arguments(None)), ("100 unused arrays", arguments(TREE))):
        kept = lowered.as_text().split("@main(")[1].split(") ->")[0].count("%arg")
        print(f"arguments of the compiled program, given {name}: {kept}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
