"""Claim: on a CPU, large products take the same time with a linear kernel kept (in, out) as with one kept (out, in).

    taskset -c 0 python benchmarks/kernels.py [rounds]    # half a minute

Each row is one linear map with the gradients of the input and of the kernel, in float32. (out, in) is multiplied
without a transposition of its own: `dot_general` contracts its second axis. The small ones, of few rows or to few
features, are here to be seen: for them (out, in) is faster.
"""

import statistics
import sys
from typing import Any

import jax
from jax import lax
from rich import print
from side_by_side import in_turns, seconds, show, turn, verdict

LIMIT = 1.25
CASES = [(128, 784, 512), (128, 512, 10), (512, 256, 1024), (512, 1024, 256), (16, 1024, 1024), (1, 2048, 2048)]
CONTRACTED = {"(in, out)": 0, "(out, in)": 1}  # which axis of the kernel meets the input


def product(x: Any, kernel: Any, axis: int) -> Any:
    return lax.dot_general(x, kernel, (((1,), (axis,)), ((), ())))


def forward_only(axis: int) -> Any:
    return jax.jit(lambda x, kernel, y: product(x, kernel, axis))


def both_ways(axis: int) -> Any:
    @jax.jit
    def run(x: Any, kernel: Any, y: Any) -> Any:
        out, back = jax.vjp(lambda x, kernel: product(x, kernel, axis), x, kernel)
        return out, back(y)

    return run


def timed(run: Any, *args: Any) -> Any:
    return lambda: turn(lambda: jax.block_until_ready(run(*args)))


def main(rounds: int) -> None:
    rows, ratios, large = [], [], []
    for rows_in, width, features in CASES:
        x, y = (jax.random.normal(jax.random.key(0), (rows_in, size)) for size in (width, features))
        kernel = jax.random.normal(jax.random.key(1), (width, features))
        for part, make in (("forward", forward_only), ("and backward", both_ways)):
            ways = {
                name: timed(make(axis), x, kernel if axis == 0 else kernel.T.copy(), y)
                for name, axis in CONTRACTED.items()
            }
            in_turns(ways, rounds=1)  # compiles
            found = {name: min(map(min, times)) for name, times in in_turns(ways, rounds=rounds).items()}
            ratio = found["(out, in)"] / found["(in, out)"]
            ratios.append(ratio)
            large += [ratio] if min(rows_in, width, features) >= 128 else []
            shape = f"({rows_in}, {width}) to {features}, {part}"
            rows.append((shape, seconds(found["(in, out)"]), seconds(found["(out, in)"]), f"{ratio:.2f}", ""))
    rows.append(("the geometric mean", "", "", f"{statistics.geometric_mean(ratios):.2f}", ""))
    show(f"A linear map: the best of {rounds} turns", ("work", "(in, out)", "(out, in)", "ratio", ""), rows)
    print(verdict(f"large ones within {LIMIT} x", 1 / LIMIT <= min(large) <= max(large) <= LIMIT))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 25)
