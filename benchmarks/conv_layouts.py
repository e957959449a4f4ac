"""Claim: on a CPU, a network with channels last is as fast with OHWI kernels as with HWIO; channels first is slower.

    taskset -c 0 python benchmarks/conv_layouts.py [rounds]    # two minutes
    python benchmarks/conv_layouts.py [rounds]                 # on a GPU, with larger inputs: three minutes

Each row is one convolution with the gradients of input and kernel, in float32, on a GPU in bfloat16 too: with
JAX's own gradient, and on a CPU also with that of `ops.conv`, which computes the kernel's gradient differently where
that is faster (benchmarks/convs.py). The last row is a network of two convolutions with pooling, and its gradient, over
16 images of 28 x 28; over 2,048 on a GPU.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from harness import interleave, print_table, seconds, time_steps, verdict
from jax import lax

import mlax
from mlax import nn, ops

CASES = {
    "cpu": [((8, 28, 28, 32), 64), ((2, 56, 56, 64), 64), ((4, 14, 14, 256), 256), ((64, 8, 8, 32), 32)],  # fast to run
    "gpu": [((128, 56, 56, 64), 64), ((128, 28, 28, 128), 128), ((128, 14, 14, 256), 256)],  # of a ResNet
}
DTYPES = {"cpu": ("float32",), "gpu": ("float32", "bfloat16")}
IMAGES = {"cpu": 16, "gpu": 2048}  # batch size of the network
LAYOUTS = ("NHWC/OHWI", "NHWC/HWIO", "NCHW/OIHW")
TOLERANCE, GAIN = 1.1, 1.1


def conv_step(layout: str, shape: tuple[int, ...], features: int, dtype: str, by: str) -> Any:
    image, kernel = layout.split("/")
    sizes = dict(zip("NHWC", shape, strict=True)) | {"O": features, "I": shape[-1]}
    x = jax.random.normal(jax.random.key(0), [sizes[axis] for axis in image], dtype)
    window = {**sizes, "H": 3, "W": 3}
    w = jax.random.normal(jax.random.key(1), [window[axis] for axis in kernel], dtype) / 10

    def convolve(x: Any, w: Any) -> Any:
        if by == "mlax":
            return ops.conv(x, w, layout=layout)
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=(image, kernel, image))

    @jax.jit
    def run(x: Any, w: Any) -> Any:
        y, vjp = jax.vjp(convolve, x, w)
        return vjp(jnp.ones_like(y))

    return lambda: time_steps(lambda: jax.block_until_ready(run(x, w)), steps=3)


def network_step(layout: str, dtype: str) -> Any:
    order = "channel_first" if layout.startswith("NC") else "channel_last"

    def conv(features: int) -> mlax.Layer:
        return mlax.Series(nn.Conv(features, 3, layout=layout), jax.nn.relu, nn.MaxPool(2, layout=order))

    model = mlax.Series(conv(32), conv(64), nn.Flatten(), nn.Linear(10))
    images = IMAGES[jax.default_backend()]
    shape = (images, 1, 28, 28) if order == "channel_first" else (images, 28, 28, 1)
    x = jax.random.normal(jax.random.key(0), shape, dtype)
    trainables, _ = model.init(jax.random.key(1), x)
    gradient = jax.jit(jax.grad(lambda trainables: (model.fwd(x, trainables)[0] ** 2).sum()))
    return lambda: time_steps(lambda: jax.block_until_ready(gradient(trainables)), steps=3)


def main(rounds: int) -> None:
    backend = jax.default_backend()
    measurements = {
        f"{' x '.join(map(str, shape))} to {features}, {dtype}, {by}": [
            conv_step(layout, shape, features, dtype, by) for layout in LAYOUTS
        ]
        for shape, features in CASES[backend]
        for dtype in DTYPES[backend]
        for by in (("JAX", "mlax") if backend == "cpu" else ("JAX",))
    }
    for dtype in DTYPES[backend]:
        measurements[f"a network, {dtype}, mlax"] = [network_step(layout, dtype) for layout in LAYOUTS]
    rows = []
    for name, steps in measurements.items():
        by_layout = dict(zip(LAYOUTS, steps, strict=True))
        interleave(by_layout, rounds=1)  # compiles
        times = {layout: min(map(min, repeats)) for layout, repeats in interleave(by_layout, rounds=rounds).items()}
        ratios = [times[layout] / times["NHWC/OHWI"] for layout in LAYOUTS]
        holds = ratios[1] > 1 / TOLERANCE and ratios[2] > GAIN
        claim = verdict("as claimed", holds) if name.startswith("a network") and backend == "cpu" else ""
        rows.append((name, seconds(times["NHWC/OHWI"]), *(f"{ratio:.2f}" for ratio in ratios[1:]), claim))
    header = ("input", "NHWC/OHWI", "NHWC/HWIO", "NCHW/OIHW", "claim")
    title = f"A 3 x 3 convolution, forward and backward: best of {rounds} rounds; times relative to the first"
    print_table(title, header, rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
