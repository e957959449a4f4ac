"""Claim: one call of a compiled `fwd` costs at most 1.1 times a hand-written `jax.jit` over the same variables.

There is almost nothing to compute, n additions of 4 elements, so that the time is dispatch overhead, for models of
n = 10, 100 and 1,000 layers with one leaf each. All functions share the same arrays and are interleaved. By hand, the
variables are the same nested dict as in mlax, which the claim is about, or a flat list of the arrays, the minimum that
can be passed at all: one dict per leaf, as here, is the most expensive form of plain dicts. The peers are measured in
their usual form and in the faster ones from their documentation:

- Flax NNX (guide "Performance considerations"): `nnx.jit`, the same with `graph=False`, `nnx.cached_partial`, and
  `nnx.split` with `jax.jit`;
- Equinox (page "Tricks", low-overhead loops): `filter_jit`, `partition` with `jax.jit`, and the model's leaves with
  `jax.jit`.

    python benchmarks/dispatch.py    # 2 minutes

Typical, on 2 cores of a server, JAX 0.11.2, relative to the hand-written dict: mlax 1.01 for 10, 100 and 1,000 leaves
(2.1 ms); Equinox 1.7 to 4.0; Flax NNX 1.7 to 53. On an H200: mlax 1.00, 1.01 and 1.02. A flat list costs 0.6 to 0.8.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx
from harness import interleave, print_table, seconds, verdict

import mlax

LIMIT = 1.1
X = jnp.ones(4)

Call = Callable[[], Any]


def main() -> None:
    for n in (10, 100, 1_000):
        model = mlax.Series(*(mlax.nn.Bias() for _ in range(n)))
        trainables, _ = model.init(jax.random.key(0), X)
        leaves = jax.tree.leaves(trainables)
        calls = {**by_hand(trainables, leaves), **by_mlax(model, trainables), **by_flax(leaves), **by_equinox(leaves)}
        repeats = max(1, 200 // n)
        measurements = {name: functools.partial(time_calls, call, repeats) for name, call in calls.items()}
        results = interleave(measurements, rounds=200, seconds=40)
        medians = {name: statistics.median(times) for name, times in results.items()}
        rows = []
        for name, duration in medians.items():
            ratio = duration / medians["by hand, dict"]
            claim = verdict(f"at most {LIMIT} x by hand", ratio <= LIMIT) if name == "mlax" else ""
            floor = f"{duration / medians['by hand, list']:.2f}"
            rows.append((name, seconds(duration), seconds(min(results[name])), f"{ratio:.2f}", floor, claim))
        title = f"A call with {n:,} leaves: medians of {len(results['mlax'])} rounds of {repeats}"
        print_table(title, ("function", "call", "best", "/ dict", "/ list", "claim"), rows)


def time_calls(call: Call, repeats: int) -> float:
    """Seconds per call, after one call to warm the caches."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    for _ in range(repeats):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeats


def by_hand(trainables: dict[str, dict[str, jax.Array]], leaves: list[jax.Array]) -> dict[str, Call]:
    @jax.jit
    def from_dict(x: jax.Array, weights: dict[str, dict[str, jax.Array]]) -> jax.Array:
        for layer in weights.values():
            x = x + layer["bias"]
        return x

    @jax.jit
    def from_list(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for bias in weights:
            x = x + bias
        return x

    return {"by hand, dict": lambda: from_dict(X, trainables), "by hand, list": lambda: from_list(X, leaves)}


def by_mlax(model: mlax.Layer, trainables: mlax.Tree) -> dict[str, Call]:
    fwd = jax.jit(model.fwd, static_argnames="inference_mode")
    return {"mlax": lambda: fwd(X, trainables)}


def by_flax(leaves: list[jax.Array]) -> dict[str, Call]:
    class Bias(nnx.Module):
        def __init__(self, bias: jax.Array):
            self.bias = nnx.Param(bias)

    class Model(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([Bias(bias) for bias in leaves])

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = x + layer.bias
            return x

    model = Model()
    graph, state = nnx.split(model)
    usual = nnx.jit(lambda model, x: model(x))
    tree = nnx.jit(lambda model, x: model(x), graph=False)
    cached = nnx.cached_partial(usual, model)
    split = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    return {
        "Flax NNX, nnx.jit": lambda: usual(model, X),
        "Flax NNX, nnx.jit(graph=False)": lambda: tree(model, X),
        "Flax NNX, nnx.cached_partial": lambda: cached(X),
        "Flax NNX, split and jax.jit": lambda: split(state, X),
    }


def by_equinox(leaves: list[jax.Array]) -> dict[str, Call]:
    class Bias(eqx.Module):
        bias: jax.Array

    class Model(eqx.Module):
        layers: list[Bias]

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = x + layer.bias
            return x

    model = Model([Bias(bias) for bias in leaves])
    arrays, static = eqx.partition(model, eqx.is_array)
    structure = jax.tree.structure(model)
    usual = eqx.filter_jit(lambda model, x: model(x))
    partitioned = jax.jit(lambda arrays, x: eqx.combine(arrays, static)(x))
    flat = jax.jit(lambda leaves, x: jax.tree.unflatten(structure, leaves)(x))
    return {
        "Equinox, filter_jit": lambda: usual(model, X),
        "Equinox, partition and jax.jit": lambda: partitioned(arrays, X),
        "Equinox, leaves and jax.jit": lambda: flat(leaves, X),
    }


if __name__ == "__main__":
    main()
