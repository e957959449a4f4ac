"""Claims: the compile time of `Repeat(block, n)` in each mode, from 12 blocks to 48.

(a) Scanned, with or without remat, 48 blocks compile in under 2 times the time of 12.
(b) Unrolled, they compile in under 5 times the time of 12: linearly, not quadratically.

The time is that of lowering and compiling `jax.value_and_grad` of a mean over n residual blocks (layer norm, linear
to 4 x 128, gelu, linear to 128) on an input of (64, 128), in float32; a run is the median of 20 calls of the compiled
function. Each measurement runs in a new process, interleaved with the others, and is stopped after 60 s. The other
libraries scan over stacked weights as in their guides, and unroll by a loop over a list of blocks; plain JAX is written
by hand.

    python benchmarks/compile.py    # 4 minutes

Typical, on 2 cores of a server, JAX 0.11.2: scanned 0.9 s for 12 and 1.0 s for 48; unrolled 2.0 and 6.9 s, a ratio of
3.5, where plain JAX over a list of blocks has 8.1 and Equinox 12. Unrolled with stacked variables, 48 blocks ran in
85 ms where the scan took 71 and plain JAX over a list 63: on a CPU of that size, scan.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from harness import interleave, median, print_table, report, run_isolated, seconds, verdict

FEW, MANY = 12, 48
WIDTH = 128
LIMITS = {"scan": 2.0, "remat": 2.0, "unroll": 5.0}
CAP = 60.0

Step = tuple[Callable[..., Any], tuple[Any, ...]]  # a function that returns value and gradients, and its arguments


def main() -> None:
    cases = [(library, mode, n) for library, modes in MODES.items() for mode in modes for n in (FEW, MANY)]
    results = interleave(
        {case: functools.partial(run_isolated, *map(str, case), limit=CAP) for case in cases}, rounds=3, seconds=80
    )
    rows = []
    for library, modes in MODES.items():
        for mode in modes:
            few, many = results[library, mode, FEW], results[library, mode, MANY]
            short, long = median(few, "compiling"), median(many, "compiling")
            claim = verdict(f"under {LIMITS[mode]:.0f}", long / short < LIMITS[mode]) if library == "mlax" else ""
            ratio = f"{long / short:.1f}" if all(many) else f"> {CAP / short:.1f}"
            running = [seconds(median(few, "running")), seconds(median(many, "running")) if all(many) else ""]
            rows.append((f"{library}, {mode}", seconds(short), seconds(long, CAP), ratio, *running, claim))
    rounds = len(results[cases[0]])
    header = ("library, mode", f"compile {FEW}", f"compile {MANY}", "ratio", f"run {FEW}", f"run {MANY}", "claim")
    print_table(f"Value and gradient of n residual blocks: medians of {rounds}", header, rows)


def mlax_step(mode: str, n: int) -> Step:
    import jax
    import jax.numpy as jnp

    import mlax
    from mlax import nn

    x = jnp.ones((64, WIDTH))
    inner = mlax.Series(norm=nn.LayerNorm(), up=nn.Linear(4 * WIDTH), gelu=jax.nn.gelu, down=nn.Linear(WIDTH))
    model = mlax.Repeat(mlax.Residual(inner), n, mode=mode)
    trainables, _ = model.init(jax.random.key(0), x)
    return jax.value_and_grad(lambda trainables, x: model.fwd(x, trainables)[0].mean()), (trainables, x)


def plain_step(mode: str, n: int) -> Step:
    import jax
    import jax.numpy as jnp

    def block(x: jax.Array, own: dict[str, jax.Array]) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        y = centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
        y = jax.nn.gelu((y * own["scale"] + own["shift"]) @ own["up"] + own["up_bias"])
        return x + (y @ own["down"] + own["down_bias"])  # without the parentheses XLA takes 4 times as long

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        if mode == "unroll":
            for own in weights:
                x = block(x, own)
        else:
            one = jax.checkpoint(block, prevent_cse=False) if mode == "remat" else block
            x, _ = jax.lax.scan(lambda x, own: (one(x, own), None), x, weights)
        return x.mean()

    weights = {
        "scale": jnp.ones((n, WIDTH)),
        "shift": jnp.zeros((n, WIDTH)),
        "up": jax.random.normal(jax.random.key(0), (n, WIDTH, 4 * WIDTH)) * 0.05,
        "up_bias": jnp.zeros((n, 4 * WIDTH)),
        "down": jax.random.normal(jax.random.key(1), (n, 4 * WIDTH, WIDTH)) * 0.05,
        "down_bias": jnp.zeros((n, WIDTH)),
    }
    if mode == "unroll":
        weights = [{name: weight[i] for name, weight in weights.items()} for i in range(n)]
    return jax.value_and_grad(loss), (weights, jnp.ones((64, WIDTH)))


def flax_step(mode: str, n: int) -> Step:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    class Scanned(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            @nnx.split_rngs(splits=n)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def make(rngs: nnx.Rngs) -> Block:
                return Block(rngs)

            self.blocks = make(rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x: jax.Array, block: Block) -> jax.Array:
                return block(x)

            return forward(x, self.blocks)

    class Unrolled(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(n)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for block in self.blocks:
                x = block(x)
            return x

    graph, state = nnx.split(Scanned(nnx.Rngs(0)) if mode == "scan" else Unrolled(nnx.Rngs(0)))
    return jax.value_and_grad(lambda state, x: nnx.merge(graph, state)(x).mean()), (state, jnp.ones((64, WIDTH)))


def equinox_step(mode: str, n: int) -> Step:
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    class Block(eqx.Module):
        norm: eqx.nn.LayerNorm
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key: jax.Array):
            up, down = jax.random.split(key)
            self.norm = eqx.nn.LayerNorm(WIDTH)
            self.up, self.down = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=up), eqx.nn.Linear(4 * WIDTH, WIDTH, key=down)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.down(jax.nn.gelu(self.up(self.norm(x))))

    keys = jax.random.split(jax.random.key(0), n)
    model = eqx.filter_vmap(Block)(keys) if mode == "scan" else [Block(key) for key in keys]
    arrays, static = eqx.partition(model, eqx.is_array)

    def loss(arrays: Any, x: jax.Array) -> jax.Array:
        if mode == "scan":
            x, _ = jax.lax.scan(lambda x, own: (jax.vmap(eqx.combine(own, static))(x), None), x, arrays)
        else:
            for block in eqx.combine(arrays, static):
                x = jax.vmap(block)(x)
        return x.mean()

    return jax.value_and_grad(loss), (arrays, jnp.ones((64, WIDTH)))


LIBRARIES = {"mlax": mlax_step, "plain JAX": plain_step, "Flax NNX": flax_step, "Equinox": equinox_step}
MODES = {
    "mlax": ("scan", "remat", "unroll"),
    "plain JAX": ("scan", "remat", "unroll"),
    "Flax NNX": ("scan", "unroll"),
    "Equinox": ("scan", "unroll"),
}


def measure(library: str, mode: str, blocks: str) -> None:
    import jax

    function, arguments = LIBRARIES[library](mode, int(blocks))
    jax.block_until_ready(arguments)
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    compiling = time.perf_counter() - start
    runs = []
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        runs.append(time.perf_counter() - start)
    report(compiling=compiling, running=statistics.median(runs))


if __name__ == "__main__":
    measure(*sys.argv[1:]) if len(sys.argv) > 1 else main()
