"""Claims: on a CPU, the gradients of a convolution are no slower than by JAX's own layouts, and several times as fast
inside of a loop.

    python benchmarks/convs.py [rounds]    # 3 minutes

Each row is the output and both gradients, in float32, by JAX's own rule and by `canonical_conv` (mlax/ops/_cpu.py).
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


LOOP = Case((8, 14, 14, 16), 32, 3)
STEPS = 2  # of the loop


def gradients(case: Case, *, in_loop: bool = False) -> dict[str, Any]:
    """The output and both gradients by both methods."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from mlax.ops import canonical_conv, dimension_numbers, parse_layout, resolve_windows

    rank = len(case.x) - 2
    x = jax.random.normal(jax.random.key(0), case.x)
    kernel = jnp.zeros((case.features, *(case.window,) * rank, case.x[-1]))
    axes = parse_layout("conv", "channel_last", x)
    where = resolve_windows("conv", x, axes, case.window, case.stride, "SAME")

    def own(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, where.strides, where.padding, dimension_numbers=dimension_numbers(axes)
        )

    dy = jax.random.normal(jax.random.key(1), jax.eval_shape(own, x, kernel).shape)

    def steps(convolve):
        def step(x, kernel, dy):
            y, pull = jax.vjp(convolve, x, kernel)
            return y, *pull(dy)

        def loop(x, kernel, dy):
            def update(kernel, _):
                y, dx, dkernel = step(x, kernel, dy)
                return kernel - dkernel * (y.ravel()[0] + dx.ravel()[0]), None

            return lax.scan(update, kernel, length=STEPS)[0]

        run = jax.jit(loop if in_loop else step)
        return lambda: time_steps(lambda: jax.block_until_ready(run(x, kernel, dy)), steps=3)

    return {"JAX's own": steps(own), "canonical": steps(canonical_conv(axes, where, None))}


def measure(case: Case, rounds: int, *, in_loop: bool = False) -> list[float]:
    methods = gradients(case, in_loop=in_loop)
    interleave(methods, rounds=1)  # compiles
    times = interleave(methods, rounds=rounds)
    return [statistics.median(map(min, times[method])) for method in methods]


def main(rounds: int) -> None:
    from rich import print

    rows, slow = [], []
    for case in CASES:
        own, canonical = measure(case, rounds)
        if canonical / own > TOLERANCE:
            slow.append(case)
        window = " x ".join([str(case.window)] * (len(case.x) - 2))
        kernel = f"{window}, {case.features} features" + f", stride {case.stride}" * (case.stride > 1)
        ratio = f"{canonical / own:.2f}" if case not in slow else f"[red]{canonical / own:.2f}[/red]"
        rows.append((" x ".join(map(str, case.x)), seconds(own), seconds(canonical), ratio, kernel))
    print_table(
        f"The gradients of a convolution: {rounds} rounds", ("input", "JAX's own", "canonical", "ratio", "kernel"), rows
    )
    own, canonical = measure(LOOP, rounds, in_loop=True)
    print(verdict("nowhere slower than by JAX's own layouts", not slow))
    print(verdict(f"in a loop at least 4 times as fast: {own / canonical:.1f}", own >= 4 * canonical))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
