"""Claim: 1.56 billion float32 numbers made on a GPU are there 10 times as soon as from NumPy, and 1,000 times after.

A GPT of 48 blocks of width 1,600, made three ways, each in a fresh process whose device has made a first key:
- NumPy: normal numbers drawn in float32 by `numpy.random.Generator`, leaf by leaf, then `jax.device_put`;
- plain JAX: one jitted function that draws all leaves by `jax.random`;
- mlax: `place.single().init(model, rng, x)`, and `model.init(rng, x)` without a plan.
The first time includes tracing and compilation; after that, the median of several times with other keys.

    python benchmarks/init_large.py [--blocks 48] [--width 1600] [--picture init.png]    # 3 minutes on a GPU

On a CPU, where NumPy's numbers are in place as they are made, the claim does not hold, and smaller sizes are right.
"""

import argparse
import math
import time
from typing import Any

from side_by_side import Answer, answer, fresh, seconds, show, verdict

VOCABULARY = 50_257
FORMS = ("NumPy, then transferred", "plain JAX, one program", "mlax, model.init", "mlax, plan.init")


def main(options: argparse.Namespace) -> None:
    sizes = (str(options.blocks), str(options.width))
    found = {form: fresh("--measure", form, "--blocks", sizes[0], "--width", sizes[1], limit=400) for form in FORMS}
    numpy = found[FORMS[0]]["first"]
    rows = []
    for form, times in found.items():
        claim = ""
        if form == FORMS[-1]:
            claim = f"{verdict('10 x at first', numpy > 10 * times['first'])}; "
            claim += verdict("1,000 x after", found[FORMS[0]]["after"] > 1000 * times["after"])
        first, after = numpy / times["first"], found[FORMS[0]]["after"] / times["after"]
        rows.append((form, seconds(times["first"]), f"{first:.1f}", seconds(times["after"]), f"{after:,.0f}", claim))
    header = ("way", "first time", "NumPy / it", "after", "NumPy / it", "claim")
    show(f"{found[FORMS[0]]['numbers'] / 1e9:.2f} billion numbers on {found[FORMS[0]]['device']}", header, rows)
    if options.picture:
        draw(options.picture, found)


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
    times, numbers = [], 0
    for turn in range(2 if form == FORMS[0] else 6):
        key = np.uint32(turn)
        start = time.perf_counter()
        leaves = jax.block_until_ready(jax.tree.leaves(make(key)))
        times.append(time.perf_counter() - start)
        numbers = sum(math.prod(leaf.shape) for leaf in leaves)
        del leaves
    after = sorted(times[1:])[len(times[1:]) // 2]
    answer(first=times[0], after=after, numbers=numbers, device=jax.devices()[0].device_kind)


def shapes(blocks: int, width: int) -> dict[str, tuple[int, ...]]:
    """The leaves of the model, those of all blocks stacked."""
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
        draws = np.random.default_rng(int(seed))
        leaves = {}
        for name, shape in shapes(blocks, width).items():
            if len(shape) > 1 and " " not in name:
                leaves[name] = draws.standard_normal(shape, np.float32)
                leaves[name] *= np.float32(1 / math.sqrt(shape[-2]))  # in place, or it would make one more array
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
        placed = place.single()
        return lambda seed: placed.init(model, jax.random.key(seed), x)
    return lambda seed: model.init(jax.random.key(seed), x)


def draw(path: str, found: dict[str, Answer]) -> None:
    """Both times of each way as bars, on a scale where each line is ten times the one before."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    for place, form in enumerate(reversed(found)):
        for offset, (kind, colour) in enumerate((("after", "#33BBEE"), ("first", "#0077BB"))):
            taken = found[form][kind]
            axes.barh(place + 0.4 * offset - 0.2, taken, 0.36, color=colour, label=kind if place == 0 else None)
            axes.text(taken * 1.1, place + 0.4 * offset - 0.2, seconds(taken), va="center", fontsize="small")
    axes.set_xscale("log")
    axes.set_xlim(right=axes.get_xlim()[1] * 4)
    axes.set_yticks(range(len(found)), list(reversed(found)))
    numbers = next(iter(found.values()))
    axes.set(xlabel="seconds", title=f"{numbers['numbers'] / 1e9:.2f} billion weights made on one {numbers['device']}")
    handles, _ = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], ["the first time, compilation included", "after"], loc="lower right", fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130, facecolor="white")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--picture")
    parser.add_argument("--measure", choices=FORMS)
    given = parser.parse_args()
    measure(given.measure, given.blocks, given.width) if given.measure else main(given)
