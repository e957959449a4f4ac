"""Claim: `inference_mode` as a static argument makes inference faster than a flag that is read at run time.

    taskset -c 0 python benchmarks/modes.py [rounds]    # half a minute

The work is two linear layers, each followed by dropout, over (256, 512). Static: two programs, one of them without
random numbers. Read at run time: one program, which branches with `lax.cond`, or computes both and selects with
`jnp.where`.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from harness import interleave, print_table, seconds, time_steps, verdict
from jax import lax

from mlax import ops

RATE = 0.1
X = jax.random.normal(jax.random.key(0), (256, 512))
WEIGHTS = [jax.random.normal(jax.random.key(i), (512, 512)) / 22 for i in (1, 2)]
KEY = jax.random.key(3)


def network(drop: Any) -> Any:
    def run(x: Any, weights: Any, rng: Any, inference: Any) -> Any:
        for i, weight in enumerate(weights):
            x = drop(jax.nn.relu(x @ weight), jax.random.fold_in(rng, i), inference)
        return x

    return run


def dropout(x: Any, rng: Any) -> Any:
    return ops.dropout(x, rng, RATE)


def static(x: Any, rng: Any, inference: bool) -> Any:
    return x if inference else dropout(x, rng)


def by_cond(x: Any, rng: Any, inference: Any) -> Any:
    return lax.cond(inference, lambda: x, lambda: dropout(x, rng))


def by_where(x: Any, rng: Any, inference: Any) -> Any:
    return jnp.where(inference, x, dropout(x, rng))


def main(rounds: int) -> None:
    programs = {
        "static": (jax.jit(network(static), static_argnums=3), False, True),
        "lax.cond": (jax.jit(network(by_cond)), jnp.array(False), jnp.array(True)),
        "jnp.where": (jax.jit(network(by_where)), jnp.array(False), jnp.array(True)),
    }

    def measure(program: Any, flag: Any) -> Any:
        return lambda: time_steps(lambda: jax.block_until_ready(program(X, WEIGHTS, KEY, flag)))

    rows = []
    for i, mode in enumerate(("training", "inference")):
        measurements = {name: measure(program, flags[i]) for name, (program, *flags) in programs.items()}
        interleave(measurements, rounds=1)  # compiles
        times = {name: min(map(min, repeats)) for name, repeats in interleave(measurements, rounds=rounds).items()}
        for name, duration in times.items():
            ratio = duration / times["static"]
            claim = verdict("slower", ratio > 1) if mode == "inference" and name != "static" else ""
            rows.append((f"{mode}: {name}", seconds(duration), f"{ratio:.2f}", claim))
    print_table(f"A network with dropout: best of {rounds} rounds", ("mode", "time", "/ static", "claim"), rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
