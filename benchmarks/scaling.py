"""Claim: time, memory and compilation grow with depth, width, length and batch no faster than theory says.

    python -m benchmarks.scaling [--rows FILE]      # 3 minutes on two cores, two on a GPU

Training steps of a GPT, one axis doubled twice. The exponent of an axis is the slope of a line through the logarithms.
Memory is that of activations, gradients and workspace, what XLA allocates besides the arguments. On a CPU times are
those of all threads together. On a GPU they are those of the clock, and compilation includes XLA's autotuning, which
times the kernels of each shape once in a process.
"""

import argparse
import functools
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import mlax
from benchmarks.suite.rows import about, append
from mlax import dtypes, ops, optim, train, zoo

IS_GPU = jax.default_backend() == "gpu"
METRICS = ("time", "memory", "compilation")
LARGE = {"depth": 6, "width": 1024, "length": 1024, "batch": 16}
BASE = LARGE if IS_GPU else {"depth": 3, "width": 128, "length": 128, "batch": 8}
CLOCK = time.perf_counter if IS_GPU else time.process_time  # of all threads: what else runs does not change it
FACTORS, TOLERANCE = (1, 2, 4), 0.15
HEAD, VOCABULARY, CALLS = 64, 512, 5


class Theory(NamedTuple):
    """Asymptotic exponents; in small sizes what grows more slowly makes them less."""

    time: float
    memory: float
    compilation: float


AXES = {
    # a scan compiles one block; time and activations are one block's times the depth
    "depth, scanned": Theory(1, 1, 0),
    "depth, unrolled": Theory(1, 1, 1),
    # matrix products are quadratic in the width, as are the gradients of their kernels; activations are linear
    "width": Theory(2, 2, 0),
    # attention is quadratic in the length, all else linear; cuDNN never stores the scores, XLA on a CPU does
    "length": Theory(2, 1 if IS_GPU else 2, 0),
    "batch": Theory(1, 1, 0),
}


class Point(NamedTuple):
    size: int
    time: float  # ms
    memory: float  # MiB
    compilation: float  # s


def main(rows_path: Path | None) -> int:
    points = measure_all([(axis, factor) for axis in AXES for factor in FACTORS])
    rows, failures = [], 0
    for axis, theory in AXES.items():
        curve = [points[axis, factor] for factor in FACTORS]
        for metric in METRICS:
            row = to_row(axis, metric, curve, getattr(theory, metric))
            values = ", ".join(f"{value:.3g}" for value in row["points"].values())
            words = f"{metric} ~ {axis} ^ {row['value']:.2f}, theory {row['theory']:g} ({values})"
            print(f"{'holds' if row['holds'] else 'FAILS'}: {words}", flush=True)
            rows.append(row)
            failures += not row["holds"]
    if rows_path:
        append(rows, rows_path)
    return 1 if failures else 0


def to_row(axis: str, metric: str, curve: list[Point], theory: float) -> dict[str, Any]:
    """The fitted exponent beside the theoretical one, and what it was fitted to."""
    values = {point.size: getattr(point, metric) for point in curve}
    logs = [(math.log(size), math.log(value)) for size, value in values.items()]
    slope = statistics.linear_regression(*zip(*logs, strict=True)).slope
    row = {"work": "scaling", "title": axis, "library": "mlax", "metric": metric, "value": slope, "unit": "exponent"}
    return {**row, "theory": theory, "holds": slope <= theory + TOLERANCE, "points": values, **about("mlax")}


def measure_all(sizes: list[tuple[str, int]]) -> dict[tuple[str, int], Point]:
    compile_step(sizes[0])  # the first also pays for caches of JAX
    return {size: measure(size) for size in sizes}


def measure(size: tuple[str, int]) -> Point:
    number, step, compiled, arguments, seconds = compile_step(size)
    return Point(number, time_step(step, compiled, arguments), memory(compiled), seconds)


def compile_step(size: tuple[str, int]) -> tuple[int, Any, Any, Any, float]:
    """The value of the axis, the step, its executable, shapes of variables and tokens, the seconds of compilation."""
    (axis, _, mode), numbers = size[0].partition(", "), dict(BASE)
    numbers[axis] *= size[1]
    model = make_model(numbers, "unroll" if mode == "unrolled" else "scan")
    tokens = jax.ShapeDtypeStruct((numbers["batch"], numbers["length"]), jnp.int32)

    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        logits, new = model.fwd(batch, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return ops.softmax_cross_entropy(logits, batch, accum_dtype="float32"), new

    step = train.step(objective, optim.AdamW(1e-3))
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    state = jax.eval_shape(step.init, jax.random.key(1), *variables)
    start = CLOCK()
    compiled = step.aot.compile(state, tokens)
    return numbers[axis], step, compiled, (variables, tokens), CLOCK() - start


def make_model(numbers: dict[str, int], mode: str) -> Any:
    model = zoo.GPT2(
        vocabulary=VOCABULARY,
        positions=numbers["length"],
        width=numbers["width"],
        depth=numbers["depth"],
        heads=max(1, numbers["width"] // HEAD),
    )
    model = mlax.override(model, mlax.Repeat, mode=mode)
    return dtypes.mixed_bfloat16(model) if IS_GPU else model


def memory(compiled: Any) -> float:
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


def time_step(step: Any, compiled: Any, shapes: Any) -> float:
    """The milliseconds of a step, the median of several, with random weights: zeros take a GPU less power and time."""
    variables, tokens = jax.tree.map(fill, shapes)
    state, times = step.init(jax.random.key(0), *variables), []
    for _ in range(CALLS + 1):
        start = CLOCK()
        state, metrics = compiled(state, tokens)
        jax.block_until_ready(metrics)
        times.append((CLOCK() - start) * 1e3)
    return statistics.median(times[1:])


@functools.partial(jax.jit, static_argnums=0)
def fill(leaf: Any) -> jax.Array:
    key = jax.random.key(0)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return jax.random.randint(key, leaf.shape, 0, VOCABULARY, leaf.dtype)
    return 0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=Path, help="a file that the rows are appended to")
    sys.exit(main(parser.parse_args().rows))
