"""Claim: on a CPU, the kernel's gradient of a convolution is computed in chunks where that is faster, and only there.

    python benchmarks/convs.py [rounds]    # 3 minutes

Each row is the gradient of the kernel alone, in float32, by JAX's own rule and a few examples at a time, and which of
the two mlax chooses (`prefers_chunked_kernel_grad`, in mlax/ops/_cpu.py).
"""

import statistics
import sys
from typing import Any, NamedTuple

from harness import interleave, print_table, seconds, time_steps, verdict

TOLERANCE = 1.15  # for the noise of small cases


class Case(NamedTuple):
    """The shape of the input, channels last, the features, and the window and stride of every spatial axis."""

    x: tuple[int, ...]
    features: int
    window: int
    stride: int = 1


CASES = [
    Case((128, 28, 28, 1), 32, 3),
    Case((128, 14, 14, 32), 64, 3),
    Case((128, 32, 32, 3), 64, 3),
    Case((32, 28, 28, 32), 64, 3),
    Case((32, 56, 56, 32), 64, 3, stride=2),
    Case((16, 56, 56, 64), 64, 3),
    Case((32, 14, 14, 256), 256, 3),
    Case((32, 7, 7, 512), 512, 3),
    Case((2, 56, 56, 64), 64, 3),
    Case((1, 56, 56, 64), 64, 3),
    Case((64, 8, 8, 32), 32, 3),
    Case((64, 8, 8, 1), 32, 3),
    Case((64, 4, 4, 32), 64, 3),
    Case((16, 56, 56, 64), 64, 1),
    Case((16, 56, 56, 64), 256, 1),
    Case((16, 28, 28, 128), 256, 1, stride=2),
    Case((8, 7, 7, 512), 2048, 1),
    Case((8, 16, 16, 16, 16), 32, 3),
    Case((4, 32, 32, 16), 32, 3),
    Case((8, 64, 64, 3), 32, 3),
    Case((4, 224, 224, 3), 64, 7, stride=2),
    Case((32, 224, 224, 3), 64, 7, stride=2),
    Case((32, 1000, 64), 64, 3),
    Case((32, 128, 128), 128, 5),
]


def gradients(case: Case) -> tuple[dict[str, Any], bool]:
    """The kernel's gradient by both methods, and whether mlax chooses the second."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from mlax.ops import (
        dimension_numbers,
        parse_layout,
        prefers_chunked_kernel_grad,
        resolve_windows,
        with_chunked_kernel_grad,
    )

    rank = len(case.x) - 2
    x = jax.random.normal(jax.random.key(0), case.x)
    kernel = jnp.zeros((case.features, *(case.window,) * rank, case.x[-1]))
    axes = parse_layout("conv", "channel_last", x)
    where = resolve_windows("conv", x, axes, case.window, case.stride, "SAME")

    def whole(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, where.strides, where.padding, dimension_numbers=dimension_numbers(axes)
        )

    y = jax.random.normal(jax.random.key(1), jax.eval_shape(whole, x, kernel).shape)

    def steps(convolve):
        step = jax.jit(lambda x, y: jax.vjp(lambda kernel: convolve(x, kernel), kernel)[1](y)[0])
        return lambda: time_steps(lambda: jax.block_until_ready(step(x, y)), steps=3)

    methods = {"JAX's own": steps(whole), "in chunks": steps(with_chunked_kernel_grad(whole, axes, where, None))}
    return methods, prefers_chunked_kernel_grad(x, axes, 1, None)


def main(rounds: int) -> None:
    from rich import print

    rows, slow = [], []
    for case in CASES:
        methods, chosen = gradients(case)
        interleave(methods, rounds=1)  # compiles
        times = interleave(methods, rounds=rounds)
        own, chunked = (statistics.median(map(min, times[method])) for method in methods)
        slowdown = chunked / own if chosen else own / chunked
        if slowdown > TOLERANCE:
            slow.append(case)
        window = " x ".join([str(case.window)] * (len(case.x) - 2))
        kernel = f"{window}, {case.features} features" + f", stride {case.stride}" * (case.stride > 1)
        ratio = f"{chunked / own:.2f}" if slowdown <= TOLERANCE else f"[red]{chunked / own:.2f}[/red]"
        shape = " x ".join(map(str, case.x))
        rows.append((shape, seconds(own), seconds(chunked), ratio, "chunks" if chosen else "own", kernel))
    print_table(
        f"The gradient of a convolution's kernel: {rounds} rounds",
        ("input", "JAX's own", "in chunks", "ratio", "chosen", "kernel"),
        rows,
    )
    print(verdict("mlax chooses the faster method, or one as fast", not slow))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
