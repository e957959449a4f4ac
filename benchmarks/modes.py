"""Claim: `inference_mode` as a static argument makes inference faster than a flag that the program reads.

    taskset -c 0 python benchmarks/modes.py [rounds]    # half a minute

The work is two linear layers with dropout behind each, over (256, 512). Static: two programs, one of them without
random numbers. Read while it runs: one program, which chooses by `lax.cond`, or computes both and takes one by
`jnp.where`.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from side_by_side import in_turns, seconds, show, turn, verdict

from mlax import ops

RATE = 0.1
X = jax.random.normal(jax.random.key(0), (256, 512))
WEIGHTS = [jax.random.normal(jax.random.key(place), (512, 512)) / 22 for place in (1, 2)]
KEY = jax.random.key(3)


def network(drop: Any) -> Any:
    def run(x: Any, weights: Any, rng: Any, inference: Any) -> Any:
        for place, weight in enumerate(weights):
            x = drop(jax.nn.relu(x @ weight), jax.random.fold_in(rng, place), inference)
        return x

    return run


def dropped(x: Any, rng: Any) -> Any:
    return ops.dropout(x, rng, RATE)


def static(x: Any, rng: Any, inference: bool) -> Any:
    return x if inference else dropped(x, rng)


def by_cond(x: Any, rng: Any, inference: Any) -> Any:
    return lax.cond(inference, lambda: x, lambda: dropped(x, rng))


def by_where(x: Any, rng: Any, inference: Any) -> Any:
    return jnp.where(inference, x, dropped(x, rng))


def main(rounds: int) -> None:
    programs = {
        "static": (jax.jit(network(static), static_argnums=3), False, True),
        "lax.cond": (jax.jit(network(by_cond)), jnp.array(False), jnp.array(True)),
        "jnp.where": (jax.jit(network(by_where)), jnp.array(False), jnp.array(True)),
    }

    def measure(program: Any, flag: Any) -> Any:
        return lambda: turn(lambda: jax.block_until_ready(program(X, WEIGHTS, KEY, flag)))

    rows = []
    for place, mode in enumerate(("training", "inference")):
        ways = {name: measure(program, flags[place]) for name, (program, *flags) in programs.items()}
        in_turns(ways, rounds=1)  # compiles
        found = {name: min(map(min, times)) for name, times in in_turns(ways, rounds=rounds).items()}
        for name, duration in found.items():
            ratio = duration / found["static"]
            claim = verdict("slower", ratio > 1) if mode == "inference" and name != "static" else ""
            rows.append((f"{mode}: {name}", seconds(duration), f"{ratio:.2f}", claim))
    show(f"A network with dropout: the best of {rounds} turns", ("mode", "time", "/ static", "claim"), rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
