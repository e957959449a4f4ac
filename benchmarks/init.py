"""Claims: a transformer-like stack of 12 blocks initializes fast in a cold process.

(a) The shape pass, `jax.eval_shape(model.init, key, x)`, takes under 0.2 s.
(b) `init` is faster than that of the same model in Flax NNX, Equinox and Haiku, eager or jitted: as a Series of
    12 blocks, and as Repeat(block, 12), whose peers are the stacked forms of the other libraries.
(c) Equal shapes share one compiled initializer: 12 blocks compile no more programs than one block.

Each measurement runs in a new process, the libraries interleaved. It starts when the imports are done and the device
has created a first key, and ends when all leaves are ready. A block has 12 leaves: two layer norms, and linear layers
768 -> 2304, 768 -> 768, 768 -> 3072 and 3072 -> 768, in float32; 12 blocks have 85 million elements. Each library uses
its default initializers: truncated normal, but uniform in Equinox, for biases too. Plain JAX is what one would write by
hand.

    python benchmarks/init.py    # 5 minutes

Typical, on 2 quiet cores of a server, JAX 0.11.2. Series: mlax 2.0 s, Flax NNX 2.9, Equinox 3.0, Haiku 4.3, jitted 4.7
to 6.4. Repeat: mlax 2.18 s and Haiku's jitted layer_stack 2.16, a tie; all others 3.1 to 5.0. Programs: 7 for one
block and for 12. Shapes, on 2 quiet cores of a smaller machine: mlax 0.09 s with JAX 0.10.2, 0.10 s with JAX 0.12.
"""

import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from harness import Result, interleave, median, print_table, record_compilations, report, run_isolated, seconds, verdict

BLOCKS, WIDTH = 12, 768
LINEARS = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
SHAPE_PASS = 0.2  # seconds

HEADER = ("library", "imports", "time", "CPU time", "compiled", "compiling", "time / mlax", "claim")

Case = tuple[str, str]  # a library and a form
Form = Callable[[], Any]  # creates a model and returns a tree of its leaves


def main() -> None:
    passes = [(library, "shape pass") for library in LIBRARIES]
    series = [("mlax", "series"), *((library, form) for library in PEERS for form in ("series", "series, jit"))]
    repeat = [("mlax", "repeat"), *((library, form) for library in PEERS for form in ("repeat", "repeat, jit"))]
    results = interleave(
        {case: functools.partial(run_isolated, *case) for case in (*passes, *series, *repeat)}, rounds=4, seconds=120
    )
    rounds = len(results["mlax", "series"])
    times = {case: median(each, "seconds") for case, each in results.items()}

    claim = verdict(f"under {SHAPE_PASS} s", times["mlax", "shape pass"] < SHAPE_PASS)
    print_table(f"(a) Shapes of 12 blocks: medians of {rounds}", HEADER, _rows(passes, results, claim))
    for name, cases in ("Series of 12 blocks", series), ("Repeat(block, 12)", repeat):
        fastest = min((case for case in cases if case[0] != "plain JAX"), key=times.__getitem__)
        claim = verdict("fastest library", fastest[0] == "mlax")
        print_table(f"(b) {name}: medians of {rounds}", HEADER, _rows(cases, results, claim))

    rows = []
    for library in LIBRARIES:
        one, all_ = run_isolated(library, "one block")["compilations"], results[library, "series"][0]["compilations"]
        claim = verdict("no more for 12 blocks", all_ <= one) if library == "mlax" else ""
        rows.append((library, str(one), str(all_), f"{all_ / one:.2f}", claim))
    print_table("(c) Programs compiled", ("library, eager", "one block", "12 blocks", "ratio", "claim"), rows)


def _rows(cases: list[Case], results: dict[Case, list[Result]], claim: str) -> Iterator[tuple[str, ...]]:
    """One row per case; the first of them is mlax and gets the claim."""
    for library, form in cases:
        each = results[library, form]
        duration = median(each, "seconds")
        yield (
            f"{library}, jit" if "jit" in form else library,
            seconds(median(each, "imports")),
            seconds(duration),
            seconds(median(each, "cpu")),
            f"{median(each, 'compilations'):.0f}",
            seconds(median(each, "compiling")),
            f"{duration / median(results[cases[0]], 'seconds'):.2f}",
            claim if library == "mlax" else "",
        )


def mlax_forms() -> dict[str, Form]:
    import jax
    import jax.numpy as jnp

    import mlax
    from mlax import nn

    def block() -> mlax.Layer:
        return mlax.Series(
            norm1=nn.LayerNorm(),
            qkv=nn.Linear(3 * WIDTH),
            value=first_third,
            mix=nn.Linear(WIDTH),
            norm2=nn.LayerNorm(),
            up=nn.Linear(4 * WIDTH),
            gelu=jax.nn.gelu,
            down=nn.Linear(WIDTH),
        )

    def series(blocks: int = BLOCKS) -> mlax.Layer:
        return mlax.Series(**{f"block{i}": block() for i in range(blocks)})

    x = jax.ShapeDtypeStruct((1, WIDTH), jnp.float32)
    return {
        "shape pass": lambda: jax.eval_shape(series().init, jax.random.key(0), x),
        "one block": lambda: series(1).init(jax.random.key(0), x),
        "series": lambda: series().init(jax.random.key(0), x),
        "repeat": lambda: mlax.Repeat(block(), BLOCKS).init(jax.random.key(0), x),
    }


def plain_forms() -> dict[str, Form]:
    import jax
    import jax.numpy as jnp

    def block(key: jax.Array) -> list[jax.Array]:
        leaves = [jnp.ones(WIDTH), jnp.zeros(WIDTH), jnp.ones(WIDTH), jnp.zeros(WIDTH)]
        for (d, f), own in zip(LINEARS, jax.random.split(key, len(LINEARS)), strict=True):
            leaves += [jax.random.truncated_normal(own, -2.0, 2.0, (d, f)) * (1.137 / d**0.5), jnp.zeros(f)]
        return leaves

    def series(key: jax.Array, blocks: int = BLOCKS) -> list[list[jax.Array]]:
        return [block(key) for key in jax.random.split(key, blocks)]

    def repeat(key: jax.Array) -> list[jax.Array]:
        return jax.vmap(block)(jax.random.split(key, BLOCKS))

    return {
        "shape pass": lambda: jax.eval_shape(series, jax.random.key(0)),
        "one block": lambda: series(jax.random.key(0), 1),
        "series": lambda: series(jax.random.key(0)),
        "series, jit": lambda: jax.jit(series)(jax.random.key(0)),
        "repeat": lambda: repeat(jax.random.key(0)),
        "repeat, jit": lambda: jax.jit(repeat)(jax.random.key(0)),
    }


def flax_forms() -> dict[str, Form]:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
            self.qkv, self.mix, self.up, self.down = (nnx.Linear(d, f, rngs=rngs) for d, f in LINEARS)

    class Series(nnx.Module):
        def __init__(self, rngs: nnx.Rngs, blocks: int = BLOCKS):
            self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])

    @nnx.split_rngs(splits=BLOCKS)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def repeat(rngs: nnx.Rngs) -> Block:
        return Block(rngs)

    return {
        "shape pass": lambda: nnx.state(nnx.eval_shape(lambda: Series(nnx.Rngs(0)))),
        "one block": lambda: nnx.state(Series(nnx.Rngs(0), 1)),
        "series": lambda: nnx.state(Series(nnx.Rngs(0))),
        "series, jit": lambda: nnx.state(nnx.jit(lambda: Series(nnx.Rngs(0)))()),
        "repeat": lambda: nnx.state(repeat(nnx.Rngs(0))),
        "repeat, jit": lambda: nnx.state(nnx.jit(lambda: repeat(nnx.Rngs(0)))()),
    }


def equinox_forms() -> dict[str, Form]:
    import equinox as eqx
    import jax

    class Block(eqx.Module):
        norms: list[eqx.nn.LayerNorm]
        linears: list[eqx.nn.Linear]

        def __init__(self, key: jax.Array):
            self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]
            keys = jax.random.split(key, len(LINEARS))
            self.linears = [eqx.nn.Linear(d, f, key=key) for (d, f), key in zip(LINEARS, keys, strict=True)]

    def series(key: jax.Array, blocks: int = BLOCKS) -> list[Block]:
        return [Block(key) for key in jax.random.split(key, blocks)]

    def repeat(key: jax.Array) -> Block:
        return eqx.filter_vmap(Block)(jax.random.split(key, BLOCKS))

    return {
        "shape pass": lambda: eqx.filter_eval_shape(series, jax.random.key(0)),
        "one block": lambda: series(jax.random.key(0), 1),
        "series": lambda: series(jax.random.key(0)),
        "series, jit": lambda: eqx.filter_jit(series)(jax.random.key(0)),
        "repeat": lambda: repeat(jax.random.key(0)),
        "repeat, jit": lambda: eqx.filter_jit(repeat)(jax.random.key(0)),
    }


def haiku_forms() -> dict[str, Form]:
    import haiku as hk
    import jax
    import jax.numpy as jnp

    def block(x: jax.Array) -> jax.Array:
        x = first_third(hk.Linear(3 * WIDTH)(hk.LayerNorm(-1, True, True)(x)))
        x = hk.LayerNorm(-1, True, True)(hk.Linear(WIDTH)(x))
        return hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(4 * WIDTH)(x)))

    def in_series(x: jax.Array, blocks: int = BLOCKS) -> jax.Array:
        for _ in range(blocks):
            x = block(x)
        return x

    one = hk.transform(lambda x: in_series(x, 1)).init
    series = hk.transform(in_series).init
    repeat = hk.transform(lambda x: hk.experimental.layer_stack(BLOCKS)(block)(x)).init
    return {
        "shape pass": lambda: jax.eval_shape(series, jax.random.key(0), jnp.zeros((1, WIDTH))),
        "one block": lambda: one(jax.random.key(0), jnp.zeros((1, WIDTH))),
        "series": lambda: series(jax.random.key(0), jnp.zeros((1, WIDTH))),
        "series, jit": lambda: jax.jit(series)(jax.random.key(0), jnp.zeros((1, WIDTH))),
        "repeat": lambda: repeat(jax.random.key(0), jnp.zeros((1, WIDTH))),
        "repeat, jit": lambda: jax.jit(repeat)(jax.random.key(0), jnp.zeros((1, WIDTH))),
    }


def first_third(x: Any) -> Any:
    return x[..., : x.shape[-1] // 3]


PEERS = {"Flax NNX": flax_forms, "Equinox": equinox_forms, "Haiku": haiku_forms, "plain JAX": plain_forms}
LIBRARIES = {"mlax": mlax_forms, **PEERS}


def measure(library: str, form: str) -> None:
    start = time.perf_counter()
    make = LIBRARIES[library]()[form]
    import jax

    compiled = record_compilations()
    jax.block_until_ready(jax.random.key(1))
    compiled.clear()
    middle, cpu_start = time.perf_counter(), time.process_time()
    leaves = [leaf for leaf in jax.tree.leaves(make()) if hasattr(leaf, "shape")]  # Equinox has other leaves too
    jax.block_until_ready(leaves)
    end = time.perf_counter()
    elements = sum(leaf.size for leaf in leaves) * (BLOCKS if form == "one block" else 1)
    if elements != 85_054_464:
        raise ValueError(f"{library} {form}: {elements} elements instead of 85,054,464; this is another model.")
    report(
        imports=middle - start,
        seconds=end - middle,
        cpu=time.process_time() - cpu_start,
        compilations=len(compiled),
        compiling=sum(duration for _, duration in compiled),
    )


if __name__ == "__main__":
    measure(*sys.argv[1:]) if len(sys.argv) > 1 else main()
