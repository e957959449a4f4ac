"""Claims: on a Hopper GPU, kernels of Pallas are faster than what XLA computes otherwise, and compute the same.

    python benchmarks/gpu_kernels.py                # two minutes; without such a GPU it says so
    python benchmarks/gpu_kernels.py --only MLP     # functions whose name contains it
    python benchmarks/gpu_kernels.py --other        # shapes of products for which mlax does not choose the kernels yet

Each row is the forward and the backward pass of one function in bfloat16, with sums in float32: by the kernels, and
without them. For several products and for an MLP the latter are products by cuBLAS, and GELU a kernel of its own. The
error is the largest one of a gradient against float32, relative, in the Euclidean norm. A program is long enough that
its launch does not count, and its arrays are larger than the cache. The last column is the rate of the kernels: bytes,
if every array is read or written once in each pass, or floating-point operations.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from harness import FAILED, interleave, print_table, seconds, time_steps, verdict
from rich import print

from mlax import ops

TOKENS, PATCHES = 32_768, 50_432  # of GPT-2, 32 x 1,024, and of ViT-B/16, 256 x 197
CHOSEN = [(TOKENS, 768), (PATCHES, 768)]  # rows and width of products that mlax computes by kernels
OTHER = [(8_192, 768), (16_384, 768), (16_384, 1024), (TOKENS, 1024), (TOKENS, 1280), (TOKENS, 2048)]
ERROR = 1e-2
ACCUM = {"accum_dtype": "float32"}
CHOICE: Any = sys.modules[ops.kernel_backend.__module__]
FUSED: Any = sys.modules[ops.linears.__module__]


class Case(NamedTuple):
    """A function that kernels compute."""

    function: Callable[..., Any]  # of its arguments
    arguments: list[Any]
    choose: Callable[[bool], AbstractContextManager[Any]]  # while tracing: with kernels, or without
    limit: float | None  # of its time, relative to that without kernels; None: no claim
    amount: float  # of bytes or operations
    unit: str = "B/s"
    is_large: bool = False  # too large for float32: the gradient with respect to x is compared, over its first rows


def cases(other: bool) -> dict[str, Case]:
    return product_cases(OTHER, None, None) if other else {**row_cases(), **product_cases(CHOSEN, 0.95, 0.97)}


def row_cases() -> dict[str, Case]:
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), 4)

    def over_rows(function: Any, arguments: list[Any], passes: int) -> Case:
        return Case(function, arguments, choose_row_kernels, 0.95, passes * arguments[0].nbytes, is_large=True)

    found = {}
    for width in (768, 4096):
        x, scale, shift = draw(keys[0], (TOKENS, width)), draw(keys[1], (width,)), draw(keys[2], (width,))
        found[f"layer norm of {width}"] = over_rows(functools.partial(ops.layer_norm, **ACCUM), [x, scale, shift], 5)
        found[f"RMS norm of {width}"] = over_rows(functools.partial(ops.rms_norm, **ACCUM), [x, scale], 5)
    x, bias = draw(keys[0], (TOKENS, 3072)), draw(keys[1], (3072,))
    for activation in (ops.gelu, ops.exact_gelu):
        biased = functools.partial(ops.activate, activation=activation)
        found[f"bias and {activation.__name__}"] = over_rows(biased, [x, bias], 5)
    labels = jax.random.randint(keys[3], (TOKENS,), 0, 50_304)

    def loss(logits: Any) -> Any:
        return ops.softmax_cross_entropy(logits, labels[: logits.shape[0]], **ACCUM)

    found["cross-entropy of 50,304 classes"] = over_rows(loss, [draw(keys[0], (TOKENS, 50_304))], 3)
    return found


def choose_row_kernels(choice: bool) -> AbstractContextManager[Any]:
    return nullcontext() if choice else mock.patch.object(CHOICE, "device_obstacle", return_value="XLA is measured")


def product_cases(
    shapes: list[tuple[int, int]], products_limit: float | None, mlp_limit: float | None
) -> dict[str, Case]:
    found = {}
    for rows, width in shapes:
        x = jax.random.normal(jax.random.key(0), (rows, width), jnp.bfloat16)
        kernels = [draw_kernel(seed, width, width) for seed in (1, 2, 3)]
        up, down = draw_kernel(4, width, 4 * width), draw_kernel(5, 4 * width, width)
        bias, flops = draw_kernel(6, 1, 4 * width)[0], 6 * rows * width * width

        def multiply(x: Any, *kernels: Any) -> Any:
            return tuple(ops.linears(x, kernels, [None] * len(kernels)))

        found[f"three products of {rows:,} x {width}"] = Case(
            multiply, [x, *kernels], choose_by("prefers_product_kernels"), products_limit, 3 * flops, "FLOP/s"
        )
        for activation in (ops.gelu, ops.exact_gelu):
            mlp = functools.partial(apply_mlp, activation=activation)
            found[f"MLP with {activation.__name__} of {rows:,} x {width}"] = Case(
                mlp, [x, up, bias, down], choose_by("prefers_mlp_kernels"), mlp_limit, 8 * flops, "FLOP/s"
            )
    return found


def apply_mlp(x: Any, up: Any, bias: Any, down: Any, *, activation: Any) -> Any:
    return ops.gelu_mlp(x, up, bias, down=down, activation=activation)


def draw_kernel(seed: int, inputs: int, outputs: int) -> Any:
    return (jax.random.normal(jax.random.key(seed), (inputs, outputs)) * inputs**-0.5).astype(jnp.bfloat16)


def choose_by(predicate: str) -> Callable[[bool], AbstractContextManager[Any]]:
    return lambda choice: mock.patch.object(FUSED, predicate, return_value=choice)


def both_passes(function: Any) -> Any:
    """A jitted function of the arguments and of a cotangent to the value and the gradients."""

    def run(arguments: Any, cotangent: Any) -> Any:
        y, pull_back = jax.vjp(function, *arguments)
        return y, pull_back(cotangent)

    return jax.jit(run)


def compile_forms(case: Case, cotangent: Any) -> dict[str, Any]:
    """Both passes, with and without the kernels."""
    forms = {}
    for form, choice in (("kernels", True), ("without", False)):
        with case.choose(choice):
            forms[form] = both_passes(case.function).lower(case.arguments, cotangent).compile()
    return forms


def measure(program: Any, arguments: list[Any], cotangent: Any) -> float:
    return min(time_steps(lambda: jax.block_until_ready(program(arguments, cotangent)), 10))


def gradient_error(case: Case, cotangent: Any, found: list[Any]) -> float:
    """The largest relative error of a gradient against float32."""
    arguments = case.arguments
    if case.is_large:
        rows = 2048
        arguments, cotangent, found = [arguments[0][:rows], *arguments[1:]], cotangent[:rows], [found[0][:rows]]
    wide = functools.partial(jax.tree.map, lambda each: each.astype(jnp.float32))
    with case.choose(False), jax.default_matmul_precision("highest"):
        wanted = both_passes(case.function)(wide(arguments), wide(cotangent))[1]
    pairs = zip(wide(found), wanted, strict=False)
    return max(float(jnp.linalg.norm(one - other) / jnp.linalg.norm(other)) for one, other in pairs)


def main(rounds: int, only: str, other: bool) -> None:
    example = jax.ShapeDtypeStruct((TOKENS, 768), jnp.bfloat16)
    backend = ops.kernel_backend(example, **ACCUM)
    if not backend.startswith("mosaic"):
        print(f"There is nothing to measure, since kernels are not used: {backend.removeprefix('xla: ')}.")
        return
    rows, claims = [], []
    for name, case in cases(other).items():
        if only not in name:
            continue
        y = jax.eval_shape(case.function, *case.arguments)
        cotangent = jax.tree.map(lambda each: jax.random.normal(jax.random.key(9), each.shape, each.dtype), y)
        programs = compile_forms(case, cotangent)
        error = gradient_error(case, cotangent, list(programs["kernels"](case.arguments, cotangent)[1]))
        timers = {
            form: functools.partial(measure, program, case.arguments, cotangent) for form, program in programs.items()
        }
        times = {form: min(each) for form, each in interleave(timers, rounds=rounds).items()}
        ratio = times["kernels"] / times["without"]
        rate = f"{case.amount / times['kernels'] / 1e12:,.3g} T{case.unit}"
        rows.append((name, seconds(times["kernels"]), seconds(times["without"]), f"{ratio:.2f}", f"{error:.1e}", rate))
        if case.limit is not None:
            faster = f"{name}: at most {case.limit} of the time without kernels ({ratio:.2f})"
            claims.append((faster, ratio <= case.limit))
        claims.append((f"{name}: an error of the gradients of at most {ERROR} ({error:.1e})", error <= ERROR))
    columns = ("", "kernels", "without", "ratio", "error", "rate")
    print_table("Forward and backward pass", columns, rows)
    for claim in claims:
        print(verdict(*claim))
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", metavar="NAME", help="of these functions")
    parser.add_argument("--other", action="store_true", help="measure shapes for which kernels are not chosen yet")
    options = parser.parse_args()
    main(options.rounds, options.only, options.other)
