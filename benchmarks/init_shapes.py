"""Claim: 150 leaves of 150 distinct shapes are initialized in under 5 s in a cold process.

XLA compiles random sampling separately for each shape, so a model in which no two layers are alike is the worst case.
Here it is a chain of 75 linear layers of different widths: 75 kernels of 1e4 to 1e6 elements and 75 biases, 28 million
elements in all, float32. Each measurement runs in a new process; it starts when the imports are done and the device has
created a first key, and ends when all leaves are ready. Peers are stopped after 40 s.

    python benchmarks/init_shapes.py    # 4 minutes

Typical, on 2 quiet cores of a server, JAX 0.11.2: mlax 3.7 s with 79 programs compiled; one jit of plain JAX 22 s;
plain JAX and Flax NNX, eager, 34 s; Equinox and Haiku over 40 s.
"""

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

from harness import median, print_table, record_compilations, report, run_isolated, seconds, verdict

WIDTHS = range(100, 1001, 12)  # 76 of them
PAIRS = tuple(itertools.pairwise(WIDTHS))
LIMIT = 5.0  # seconds
CAP = 40.0


def main() -> None:
    results = {library: [] for library in LIBRARIES}
    for peer in PEERS:  # one run each, since they take so long, and one of mlax before each
        results["mlax"].append(run_isolated("mlax"))
        results[peer].append(run_isolated(peer, limit=CAP))
    own = median(results["mlax"], "seconds")
    rows = []
    for library, each in results.items():
        duration = median(each, "seconds")
        compiled, compiling, ratio = "", "", f"> {CAP / own:.1f}"
        if all(each):
            compiled, compiling = f"{median(each, 'compiled'):.0f}", seconds(median(each, "compiling"))
            ratio = f"{duration / own:.1f}"
        claim = verdict(f"under {LIMIT:.0f} s", own < LIMIT) if library == "mlax" else ""
        rows.append((library, str(len(each)), seconds(duration, CAP), compiled, compiling, ratio, claim))
    header = ("library", "runs", "time", "compiled", "compiling", "time / mlax", "claim")
    print_table("150 leaves of distinct shapes: medians", header, rows)


def mlax_chain() -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    import mlax

    model = mlax.Series(*(mlax.nn.Linear(features) for _, features in PAIRS))
    return lambda: model.init(jax.random.key(0), jax.ShapeDtypeStruct((1, WIDTHS[0]), jnp.float32))


def plain_chain() -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    def init(key: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        keys = jax.random.split(key, len(PAIRS))
        return [
            (jax.random.truncated_normal(key, -2.0, 2.0, (d, f)) * (1.137 / d**0.5), jnp.zeros(f))
            for (d, f), key in zip(PAIRS, keys, strict=True)
        ]

    return lambda: init(jax.random.key(0))


def jitted_chain() -> Callable[[], Any]:
    import jax

    return jax.jit(plain_chain())


def flax_chain() -> Callable[[], Any]:
    from flax import nnx

    def init(rngs: nnx.Rngs) -> nnx.List:
        return nnx.List([nnx.Linear(d, f, rngs=rngs) for d, f in PAIRS])

    return lambda: nnx.state(init(nnx.Rngs(0)))


def equinox_chain() -> Callable[[], Any]:
    import equinox as eqx
    import jax

    def init(key: jax.Array) -> list[eqx.nn.Linear]:
        keys = jax.random.split(key, len(PAIRS))
        return [eqx.nn.Linear(d, f, key=key) for (d, f), key in zip(PAIRS, keys, strict=True)]

    return lambda: init(jax.random.key(0))


def haiku_chain() -> Callable[[], Any]:
    import haiku as hk
    import jax
    import jax.numpy as jnp

    init = hk.transform(lambda x: hk.Sequential([hk.Linear(f) for _, f in PAIRS])(x)).init
    return lambda: init(jax.random.key(0), jnp.zeros((1, WIDTHS[0])))


PEERS = {
    "plain JAX": plain_chain,
    "plain JAX, one jit": jitted_chain,
    "Flax NNX": flax_chain,
    "Equinox": equinox_chain,
    "Haiku": haiku_chain,
}
LIBRARIES = {"mlax": mlax_chain, **PEERS}


def measure(library: str) -> None:
    init = LIBRARIES[library]()
    import jax

    compiled = record_compilations()
    jax.block_until_ready(jax.random.key(1))
    compiled.clear()
    start = time.perf_counter()
    leaves = [leaf for leaf in jax.tree.leaves(init()) if hasattr(leaf, "shape")]  # Equinox has other leaves too
    jax.block_until_ready(leaves)
    duration = time.perf_counter() - start
    if len({leaf.shape for leaf in leaves}) != 150:
        raise ValueError(f"{library}: {len(leaves)} leaves instead of 150 distinct shapes; this is another model.")
    report(seconds=duration, compiled=len(compiled), compiling=sum(duration for _, duration in compiled))


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
