"""Claim: large products take the same time with a linear kernel stored as (in, out) as with (out, in).

    taskset -c 0 python benchmarks/kernel_layouts.py [rounds]    # half a minute
    python benchmarks/kernel_layouts.py [rounds]                 # on a GPU, with larger inputs: a minute

Each row is one linear layer with the gradients of input and kernel, in float32, on a GPU in bfloat16 too. (out, in) is
multiplied without an explicit transpose: `dot_general` contracts its second axis. The small cases, with few rows or few
features, are shown for information: for them (out, in) is faster on a CPU. On a GPU one program computes several layers
with different kernels, as a model does, so that its launch does not count and no kernel is in a cache.
"""

import statistics
import sys
from typing import Any

import jax
from harness import interleave, print_table, seconds, time_steps, verdict
from jax import lax
from rich import print

LIMIT = 1.25
CASES = {
    "cpu": [(128, 784, 512), (128, 512, 10), (512, 256, 1024), (512, 1024, 256), (16, 1024, 1024), (1, 2048, 2048)],
    "gpu": [
        (8192, 2048, 2048),
        (8192, 1024, 4096),
        (8192, 4096, 1024),
        (8192, 4096, 10),
        (8, 4096, 4096),
        (1, 4096, 4096),
    ],
}
DTYPES = {"cpu": ("float32",), "gpu": ("float32", "bfloat16")}
TOTAL = 2**28  # bytes of the kernels in one program on a GPU, more than fit in its cache
CONTRACTED = {"(in, out)": 0, "(out, in)": 1}  # the contracting axis of the kernel


def product(x: Any, kernel: Any, axis: int) -> Any:
    return lax.dot_general(x, kernel, (((1,), (axis,)), ((), ())))


def forward_only(axis: int) -> Any:
    return jax.jit(lambda layers: [product(x, kernel, axis) for x, kernel, _ in layers])


def forward_and_backward(axis: int) -> Any:
    def one(x: Any, kernel: Any, y: Any) -> Any:
        out, vjp = jax.vjp(lambda x, kernel: product(x, kernel, axis), x, kernel)
        return out, vjp(y)

    return jax.jit(lambda layers: [one(*each) for each in layers])


def make_layers(case: tuple[int, int, int], dtype: str, axis: int) -> Any:
    rows, width, features = case
    number = min(64, max(1, TOTAL // (width * features * 4))) if jax.default_backend() == "gpu" else 1
    shapes = {"x": (rows, width), "kernel": (width, features)[:: 1 - 2 * axis], "y": (rows, features)}
    keys = jax.random.split(jax.random.key(0), (number, 3))
    return [
        [jax.random.normal(key, shape, dtype) for key, shape in zip(own, shapes.values(), strict=True)] for own in keys
    ]


def measure(run: Any, layers: Any) -> Any:
    return lambda: [duration / len(layers) for duration in time_steps(lambda: jax.block_until_ready(run(layers)))]


def main(rounds: int) -> None:
    rows, ratios, large = [], [], []
    backend = jax.default_backend()
    for case, dtype in [(case, dtype) for case in CASES[backend] for dtype in DTYPES[backend]]:
        inputs = {name: make_layers(case, dtype, axis) for name, axis in CONTRACTED.items()}
        for part, make in (("forward", forward_only), ("and backward", forward_and_backward)):
            measurements = {name: measure(make(axis), inputs[name]) for name, axis in CONTRACTED.items()}
            interleave(measurements, rounds=1)  # compiles
            times = {name: min(map(min, repeats)) for name, repeats in interleave(measurements, rounds=rounds).items()}
            ratio = times["(out, in)"] / times["(in, out)"]
            ratios.append(ratio)
            large += [ratio] if min(case) >= 128 else []
            work = f"{case[:2]} to {case[2]}, {dtype}, {part}"
            rows.append((work, seconds(times["(in, out)"]), seconds(times["(out, in)"]), f"{ratio:.2f}", ""))
    rows.append(("geometric mean", "", "", f"{statistics.geometric_mean(ratios):.2f}", ""))
    print_table(f"A linear layer: best of {rounds} rounds", ("work", "(in, out)", "(out, in)", "ratio", ""), rows)
    print(verdict(f"large products within {LIMIT} x", 1 / LIMIT <= min(large) <= max(large) <= LIMIT))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 25)
