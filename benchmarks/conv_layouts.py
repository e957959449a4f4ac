"""Claim: on a CPU, a network with channels last is as fast with OHWI kernels as with HWIO; channels first is slower.

    taskset -c 0 python benchmarks/conv_layouts.py [rounds]    # two minutes

Each row is one convolution with the gradients of the input and of the kernel, in float32: as JAX computes it, and as
`ops.conv` does, which takes another way to the kernel's gradient where that is faster (benchmarks/convs.py). The last
row is a network of two convolutions with pooling, and its gradient, over 16 images of 28 x 28.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from side_by_side import in_turns, seconds, show, turn, verdict

import mlax
from mlax import nn, ops

CASES = [((8, 28, 28, 32), 64), ((2, 56, 56, 64), 64), ((4, 14, 14, 256), 256), ((64, 8, 8, 32), 32)]  # short ones
LAYOUTS = ("NHWC/OHWI", "NHWC/HWIO", "NCHW/OIHW")
LOSES, GAINS = 1.1, 1.1


def steps(layout: str, shape: tuple[int, ...], features: int, by: str) -> Any:
    image, kernel = layout.split("/")
    sizes = dict(zip("NHWC", shape, strict=True)) | {"O": features, "I": shape[-1]}
    x = jax.random.normal(jax.random.key(0), [sizes[axis] for axis in image])
    window = {**sizes, "H": 3, "W": 3}
    w = jax.random.normal(jax.random.key(1), [window[axis] for axis in kernel]) / 10

    def convolved(x: Any, w: Any) -> Any:
        if by == "mlax":
            return ops.conv(x, w, layout=layout)
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=(image, kernel, image))

    @jax.jit
    def run(x: Any, w: Any) -> Any:
        y, back = jax.vjp(convolved, x, w)
        return back(jnp.ones_like(y))

    return lambda: turn(lambda: jax.block_until_ready(run(x, w)), steps=3)


def network(layout: str) -> Any:
    first = "channel_first" if layout.startswith("NC") else "channel_last"

    def conv(features: int) -> mlax.Layer:
        return mlax.Series(nn.Conv(features, 3, layout=layout), mlax.F(jax.nn.relu), nn.MaxPool(2, layout=first))

    model = mlax.Series(conv(32), conv(64), nn.Flatten(), nn.Linear(10))
    x = jax.random.normal(jax.random.key(0), (16, 1, 28, 28) if first == "channel_first" else (16, 28, 28, 1))
    trainables, _ = model.init(jax.random.key(1), x)
    gradient = jax.jit(jax.grad(lambda trainables: (model.fwd(x, trainables)[0] ** 2).sum()))
    return lambda: turn(lambda: jax.block_until_ready(gradient(trainables)), steps=3)


def main(rounds: int) -> None:
    works = {
        f"{' x '.join(map(str, shape))} to {features}, {by}": [steps(layout, shape, features, by) for layout in LAYOUTS]
        for shape, features in CASES
        for by in ("JAX", "mlax")
    }
    works["a network, mlax"] = [network(layout) for layout in LAYOUTS]
    rows = []
    for name, work in works.items():
        ways = dict(zip(LAYOUTS, work, strict=True))
        in_turns(ways, rounds=1)  # compiles
        found = {layout: min(map(min, times)) for layout, times in in_turns(ways, rounds=rounds).items()}
        ratios = [found[layout] / found["NHWC/OHWI"] for layout in LAYOUTS]
        holds = ratios[1] > 1 / LOSES and ratios[2] > GAINS
        claim = verdict("as claimed", holds) if name.startswith("a network") else ""
        rows.append((name, seconds(found["NHWC/OHWI"]), *(f"{ratio:.2f}" for ratio in ratios[1:]), claim))
    header = ("input", "NHWC/OHWI", "NHWC/HWIO", "NCHW/OIHW", "claim")
    show(f"A 3 x 3 convolution, forward and backward: the best of {rounds} turns; ratios to the first", header, rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
