"""Claim: creating 1.56 billion float32 weights on a GPU is 10 times as fast as with NumPy at first, then 1,000 times.

A GPT of 48 blocks of width 1,600, initialized three ways, each in a new process whose device has created a first key:
- NumPy: normal samples in float32 from `numpy.random.Generator`, leaf by leaf, then `jax.device_put`;
- plain JAX: one jitted function that samples all leaves with `jax.random`;
- mlax: `place.single().init(model, rng, x)`, and `model.init(rng, x)` without a plan.
The first time includes tracing and compilation; after that, the median of several runs with other keys.

    python benchmarks/init_large.py [--blocks 48] [--width 1600] [--plot init.png]    # 3 minutes on a GPU

On a CPU, where NumPy needs no transfer, the claim does not hold; use smaller sizes there.
"""

import argparse
import math
import time
from typing import Any

from harness import Result, print_table, report, run_isolated, seconds, verdict

VOCABULARY = 50_257
FORMS = ("NumPy, then transferred", "plain JAX, one program", "mlax, model.init", "mlax, plan.init")


def main(options: argparse.Namespace) -> None:
    sizes = (str(options.blocks), str(options.width))
    size_options = ("--blocks", sizes[0], "--width", sizes[1])
    results = {form: run_isolated("--measure", form, *size_options, limit=400) for form in FORMS}
    numpy = results[FORMS[0]]["first"]
    rows = []
    for form, times in results.items():
        claim = ""
        if form == FORMS[-1]:
            claim = f"{verdict('10 x at first', numpy > 10 * times['first'])}; "
            claim += verdict("1,000 x after that", results[FORMS[0]]["after"] > 1000 * times["after"])
        first, after = numpy / times["first"], results[FORMS[0]]["after"] / times["after"]
        rows.append((form, seconds(times["first"]), f"{first:.1f}", seconds(times["after"]), f"{after:,.0f}", claim))
    header = ("method", "first time", "NumPy / it", "after that", "NumPy / it", "claim")
    print_table(
        f"{results[FORMS[0]]['elements'] / 1e9:.2f} billion weights on {results[FORMS[0]]['device']}", header, rows
    )
    if options.plot:
        plot(options.plot, results)


def measure(form: str, blocks: int, width: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    make = {
        FORMS[0]: numpy_form,
        FORMS[1]: plain_form,
        FORMS[2]: lambda *sizes: mlax_form(*sizes, plan=False),
        FORMS[3]: lambda *sizes: mlax_form(*sizes, plan=True),
    }[form](blocks, width)
    jax.block_until_ready(jax.random.normal(jax.random.key(1), (8,)) + jnp.float32(1))
    times, elements = [], 0
    for repeat in range(2 if form == FORMS[0] else 6):
        key = np.uint32(repeat)
        start = time.perf_counter()
        leaves = jax.block_until_ready(jax.tree.leaves(make(key)))
        times.append(time.perf_counter() - start)
        elements = sum(math.prod(leaf.shape) for leaf in leaves)
        del leaves
    after = sorted(times[1:])[len(times[1:]) // 2]
    report(first=times[0], after=after, elements=elements, device=jax.devices()[0].device_kind)


def shapes(blocks: int, width: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the leaves, with those of all blocks stacked."""
    linears = {
        "query": (width, width),
        "key": (width, width),
        "value": (width, width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    stacked = {name: (blocks, *shape) for name, shape in linears.items()}
    vectors = {f"{name} bias": (blocks, shape[-1]) for name, shape in linears.items()}
    norms = {f"norm{i} {leaf}": (blocks, width) for i in (1, 2) for leaf in ("scale", "shift")}
    ends = {"embed": (VOCABULARY, width), "scale": (width,), "shift": (width,)}
    return {**stacked, **vectors, **norms, **ends}


def numpy_form(blocks: int, width: int) -> Any:
    import jax
    import numpy as np

    def make(seed: Any) -> Any:
        generator = np.random.default_rng(int(seed))
        leaves = {}
        for name, shape in shapes(blocks, width).items():
            if len(shape) > 1 and " " not in name:
                leaves[name] = generator.standard_normal(shape, np.float32)
                leaves[name] *= np.float32(1 / math.sqrt(shape[-2]))  # in place, without another array
            else:
                leaves[name] = np.zeros(shape, np.float32)
        return jax.device_put(leaves)

    return make


def plain_form(blocks: int, width: int) -> Any:
    import jax
    import jax.numpy as jnp

    @jax.jit
    def make(seed: Any) -> Any:
        key = jax.random.key(seed)
        return {
            name: jax.random.normal(jax.random.fold_in(key, i), shape) / math.sqrt(shape[-2])
            if len(shape) > 1 and " " not in name
            else jnp.zeros(shape)
            for i, (name, shape) in enumerate(shapes(blocks, width).items())
        }

    return make


def mlax_form(blocks: int, width: int, *, plan: bool) -> Any:
    import jax
    import jax.numpy as jnp

    import mlax
    from mlax import nn, place

    block = mlax.Series(
        attend=mlax.Residual(mlax.Series(norm1=nn.LayerNorm(), attend=nn.MultiHeadAttention(width // 64, causal=True))),
        think=mlax.Residual(mlax.Series(norm2=nn.LayerNorm(), think=nn.MLP((4 * width, width)))),
    )
    model = mlax.Series(embed=nn.Embed(VOCABULARY, width), blocks=mlax.Repeat(block, blocks), norm=nn.LayerNorm())
    x = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    if plan:
        on_device = place.single()
        return lambda seed: on_device.init(model, jax.random.key(seed), x)
    return lambda seed: model.init(jax.random.key(seed), x)


def plot(path: str, results: dict[str, Result]) -> None:
    """Plot both times of each method as bars, on a logarithmic scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    for row, form in enumerate(reversed(results)):
        for offset, (kind, color) in enumerate((("after", "#33BBEE"), ("first", "#0077BB"))):
            duration = results[form][kind]
            axes.barh(row + 0.4 * offset - 0.2, duration, 0.36, color=color, label=kind if row == 0 else None)
            axes.text(duration * 1.1, row + 0.4 * offset - 0.2, seconds(duration), va="center", fontsize="small")
    axes.set_xscale("log")
    axes.set_xlim(right=axes.get_xlim()[1] * 4)
    axes.set_yticks(range(len(results)), list(reversed(results)))
    first = next(iter(results.values()))
    axes.set(
        xlabel="seconds", title=f"{first['elements'] / 1e9:.2f} billion weights initialized on one {first['device']}"
    )
    handles, _ = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], ["first time, including compilation", "after that"], loc="lower right", fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130, facecolor="white")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--plot")
    parser.add_argument("--measure", choices=FORMS)
    parsed = parser.parse_args()
    measure(parsed.measure, parsed.blocks, parsed.width) if parsed.measure else main(parsed)
