"""Claim: once compiled, a composite costs no more than the same model by hand; tracing takes at most 1.5 times as long.

    taskset -c 0 python benchmarks/wiring.py [rounds]    # half a minute

Twelve blocks of a norm and an MLP, unrolled, as composites and written out by hand over the same variables. Measured: a
call without `jit`, a trace of the forward pass, and a call of the compiled program.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from harness import interleave, print_table, seconds, time_steps, verdict

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
    for i in range(DEPTH):
        own = trainables[f"block_{i}"]
        y = ops.layer_norm(x, own["norm"]["scale"], own["norm"]["shift"])
        y = ops.linear(jax.nn.gelu(ops.linear(y, own["up"]["kernel"], own["up"]["bias"])), **own["down"])
        x = x + y
    return x


def time_trace(function: Callable[..., Any], *args: Any) -> Callable[[], float]:
    def measure() -> float:
        start = time.perf_counter()
        jax.make_jaxpr(lambda *args: function(*args))(*args)  # a new function each time, which is in no cache
        return time.perf_counter() - start

    return measure


def main(rounds: int) -> None:
    model = mlax.Series(*(Block(WIDTH) for _ in range(DEPTH)))
    x = jnp.ones((8, WIDTH))
    trainables, _ = model.init(jax.random.key(0), x)

    def composite(x: Any, trainables: Any) -> Any:
        return model.fwd(x, trainables)[0]

    functions = {"composites": composite, "by hand": by_hand}
    assert jnp.allclose(*(function(x, trainables) for function in functions.values()), atol=1e-5)

    def time_eager(function: Callable[..., Any]) -> Callable[[], float]:
        return lambda: min(time_steps(lambda: function(x, trainables), 3))

    def time_compiled(function: Callable[..., Any]) -> Callable[[], float]:
        compiled = jax.jit(function)
        return lambda: min(time_steps(lambda: jax.block_until_ready(compiled(x, trainables)), 20))

    work: dict[str, dict[str, Callable[[], float]]] = {
        "without jit": {name: time_eager(function) for name, function in functions.items()},
        "traced": {name: time_trace(function, x, trainables) for name, function in functions.items()},
        "compiled": {name: time_compiled(function) for name, function in functions.items()},
    }
    limits = {"traced": TRACING, "compiled": RUNNING}
    rows = []
    for name, measurements in work.items():
        interleave(measurements, rounds=2)
        times = {kind: min(repeats) for kind, repeats in interleave(measurements, rounds=rounds).items()}
        ratio = times["composites"] / times["by hand"]
        claim = verdict(f"at most {limits[name]} x", ratio <= limits[name]) if name in limits else ""
        rows.append((name, seconds(times["composites"]), seconds(times["by hand"]), f"{ratio:.2f}", claim))
    print_table(f"{DEPTH} blocks: best of {rounds} rounds", ("call", "composites", "by hand", "ratio", "claim"), rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 21)
