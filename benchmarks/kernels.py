"""Claim: large products take the same time with a linear kernel kept (in, out) as with one kept (out, in).

    taskset -c 0 python benchmarks/kernels.py [rounds]    # half a minute
    python benchmarks/kernels.py [rounds]                 # on a GPU, where it takes larger ones: a minute

Each row is one linear map with the gradients of the input and of the kernel, in float32, on a GPU in bfloat16 too.
(out, in) is multiplied without a transposition of its own: `dot_general` contracts its second axis. The small ones, of
few rows or to few features, are here to be seen: for them (out, in) is faster on a CPU. On a GPU one program makes
several maps of kernels of their own, as a model does, so that starting it does not count and no kernel is in a cache.
"""

import statistics
import sys
from typing import Any

import jax
from jax import lax
from rich import print
from side_by_side import in_turns, seconds, show, turn, verdict

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
ALL = 2**28  # bytes of the kernels in one program on a GPU, more than its cache holds
CONTRACTED = {"(in, out)": 0, "(out, in)": 1}  # which axis of the kernel meets the input


def product(x: Any, kernel: Any, axis: int) -> Any:
    return lax.dot_general(x, kernel, (((1,), (axis,)), ((), ())))


def forward_only(axis: int) -> Any:
    return jax.jit(lambda maps: [product(x, kernel, axis) for x, kernel, _ in maps])


def both_ways(axis: int) -> Any:
    def one(x: Any, kernel: Any, y: Any) -> Any:
        out, back = jax.vjp(lambda x, kernel: product(x, kernel, axis), x, kernel)
        return out, back(y)

    return jax.jit(lambda maps: [one(*each) for each in maps])


def maps(case: tuple[int, int, int], dtype: str, axis: int) -> Any:
    rows, width, features = case
    number = min(64, max(1, ALL // (width * features * 4))) if jax.default_backend() == "gpu" else 1
    shapes = {"x": (rows, width), "kernel": (width, features)[:: 1 - 2 * axis], "y": (rows, features)}
    keys = jax.random.split(jax.random.key(0), (number, 3))
    return [
        [jax.random.normal(key, shape, dtype) for key, shape in zip(own, shapes.values(), strict=True)] for own in keys
    ]


def timed(run: Any, maps: Any) -> Any:
    return lambda: [taken / len(maps) for taken in turn(lambda: jax.block_until_ready(run(maps)))]


def main(rounds: int) -> None:
    rows, ratios, large = [], [], []
    backend = jax.default_backend()
    for case, dtype in [(case, dtype) for case in CASES[backend] for dtype in DTYPES[backend]]:
        inputs = {name: maps(case, dtype, axis) for name, axis in CONTRACTED.items()}
        for part, make in (("forward", forward_only), ("and backward", both_ways)):
            ways = {name: timed(make(axis), inputs[name]) for name, axis in CONTRACTED.items()}
            in_turns(ways, rounds=1)  # compiles
            found = {name: min(map(min, times)) for name, times in in_turns(ways, rounds=rounds).items()}
            ratio = found["(out, in)"] / found["(in, out)"]
            ratios.append(ratio)
            large += [ratio] if min(case) >= 128 else []
            work = f"{case[:2]} to {case[2]}, {dtype}, {part}"
            rows.append((work, seconds(found["(in, out)"]), seconds(found["(out, in)"]), f"{ratio:.2f}", ""))
    rows.append(("the geometric mean", "", "", f"{statistics.geometric_mean(ratios):.2f}", ""))
    show(f"A linear map: the best of {rounds} turns", ("work", "(in, out)", "(out, in)", "ratio", ""), rows)
    print(verdict(f"large ones within {LIMIT} x", 1 / LIMIT <= min(large) <= max(large) <= LIMIT))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 25)
