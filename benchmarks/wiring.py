"""Claim: once compiled, a composite costs no more than the same written by hand; it takes at most 1.5 times to trace.

    taskset -c 0 python benchmarks/wiring.py [rounds]    # half a minute

Twelve blocks of a norm and an MLP, unrolled, written as composites and written out by hand over the same variables.
Measured: a call without `jit`, a trace of the forward pass, and a call of the compiled program.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from side_by_side import in_turns, seconds, show, turn, verdict

import mlax
from mlax import nn, ops

DEPTH, WIDTH = 12, 64
TRACING, RUNNING = 1.5, 1.1


@mlax.frozen
class Block(mlax.Composite):
    width: int

    def parts(self):
        return {"norm": nn.LayerNorm(), "up": nn.Linear(4 * self.width), "down": nn.Linear(self.width)}

    def wire(self, sub, x):
        return x + sub.down(jax.nn.gelu(sub.up(sub.norm(x))))


def by_hand(x: Any, trainables: Any) -> Any:
    for place in range(DEPTH):
        own = trainables[f"block_{place}"]
        y = ops.layer_norm(x, own["norm"]["scale"], own["norm"]["shift"])
        y = ops.linear(jax.nn.gelu(ops.linear(y, own["up"]["kernel"], own["up"]["bias"])), **own["down"])
        x = x + y
    return x


def traced(function: Callable[..., Any], *args: Any) -> Callable[[], float]:
    def measure() -> float:
        start = time.perf_counter()
        jax.make_jaxpr(lambda *args: function(*args))(*args)  # a new function each time: nothing is found in a cache
        return time.perf_counter() - start

    return measure


def main(rounds: int) -> None:
    model = mlax.Series(*(Block(WIDTH) for _ in range(DEPTH)))
    x = jnp.ones((8, WIDTH))
    trainables, _ = model.init(jax.random.key(0), x)

    def wired(x: Any, trainables: Any) -> Any:
        return model.fwd(x, trainables)[0]

    ways = {"composites": wired, "by hand": by_hand}
    assert jnp.allclose(*(way(x, trainables) for way in ways.values()), atol=1e-5)
    compiled = {name: jax.jit(way) for name, way in ways.items()}
    work: dict[str, dict[str, Callable[[], Any]]] = {
        "without jit": {n: lambda w=w: min(turn(lambda: w(x, trainables), 3)) for n, w in ways.items()},
        "traced": {name: traced(way, x, trainables) for name, way in ways.items()},
        "compiled": {
            n: lambda c=c: min(turn(lambda: jax.block_until_ready(c(x, trainables)), 20)) for n, c in compiled.items()
        },
    }
    limits = {"traced": TRACING, "compiled": RUNNING}
    rows = []
    for name, measures in work.items():
        in_turns(measures, rounds=2)
        found = {way: min(times) for way, times in in_turns(measures, rounds=rounds).items()}
        ratio = found["composites"] / found["by hand"]
        claim = verdict(f"at most {limits[name]} x", ratio <= limits[name]) if name in limits else ""
        rows.append((name, seconds(found["composites"]), seconds(found["by hand"]), f"{ratio:.2f}", claim))
    show(f"{DEPTH} blocks: the best of {rounds} turns", ("one call", "composites", "by hand", "ratio", "claim"), rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 21)
