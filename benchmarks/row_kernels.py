"""Claims: on a Hopper GPU, kernels of Pallas are faster than XLA's programs, and compute the same.

    python benchmarks/row_kernels.py [rounds]    # a minute; without such a GPU it says so

Each row is the forward and the backward pass of one operation over rows in bfloat16, with sums in float32: by the
kernels, and by XLA. The error is that of the gradient against float32, relative, in the Euclidean norm. A program is
long enough that its launch does not count, and its arrays are larger than the cache. The bytes are the fewest: every
array read or written once in each pass.
"""

import functools
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from harness import interleave, print_table, seconds, time_steps, verdict
from rich import print

from mlax import ops

TOKENS, LIMIT, ERROR = 32_768, 0.95, 1e-2
ACCUM = {"accum_dtype": "float32"}
KERNELS = sys.modules[ops.kernel_backend.__module__]  # which chooses between the forms


def cases() -> dict[str, tuple[Any, list[Any], float]]:
    """The function, its arguments, and how often its first argument is read or written at least."""
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), 4)
    found = {}
    for width in (768, 4096):
        x, scale, shift = draw(keys[0], (TOKENS, width)), draw(keys[1], (width,)), draw(keys[2], (width,))
        found[f"layer norm of {width}"] = (functools.partial(ops.layer_norm, **ACCUM), [x, scale, shift], 5)
        found[f"RMS norm of {width}"] = (functools.partial(ops.rms_norm, **ACCUM), [x, scale], 5)
    x, bias = draw(keys[0], (TOKENS, 3072)), draw(keys[1], (3072,))
    for activation in (ops.gelu, ops.exact_gelu):
        biased = functools.partial(ops.activate, activation=activation)
        found[f"bias and {activation.__name__}"] = (biased, [x, bias], 5)
    labels = jax.random.randint(keys[3], (TOKENS,), 0, 50_304)
    loss = functools.partial(ops.softmax_cross_entropy, labels=labels, **ACCUM)
    found["cross-entropy of 50,304 classes"] = (loss, [draw(keys[0], (TOKENS, 50_304))], 3)
    return found


def both_passes(function: Any) -> Any:
    """A jitted function of the arguments and of a cotangent to the value and the gradients."""

    def run(arguments: Any, cotangent: Any) -> Any:
        y, pull_back = jax.vjp(function, *arguments)
        return y, pull_back(cotangent)

    return jax.jit(run)


def compile_forms(function: Any, arguments: list[Any], cotangent: Any) -> dict[str, Any]:
    """Both passes, by the kernels and by XLA."""
    kernel = both_passes(function).lower(arguments, cotangent).compile()
    with mock.patch.object(KERNELS, "kernel_obstacle", return_value="XLA is measured"):
        return {"kernel": kernel, "XLA": both_passes(function).lower(arguments, cotangent).compile()}


def measure(program: Any, arguments: list[Any], cotangent: Any) -> float:
    return min(time_steps(lambda: jax.block_until_ready(program(arguments, cotangent)), 10))


def gradient_error(function: Any, arguments: list[Any], cotangent: Any, found: Any) -> float:
    """The largest relative error of a gradient, over the first rows, against float32."""
    rows = 2048
    x = arguments[0][:rows].astype(jnp.float32)
    weights = [each.astype(jnp.float32) for each in arguments[1:]]
    if "labels" in function.keywords:
        labels = function.keywords["labels"][:rows]
        function = functools.partial(function.func, **{**function.keywords, "labels": labels})
    _, pull_back = jax.vjp(function, x, *weights)
    wanted = pull_back(cotangent[:rows].astype(jnp.float32))[0]
    return float(jnp.linalg.norm(found[:rows].astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted))


def main(rounds: int) -> None:
    example = jax.ShapeDtypeStruct((TOKENS, 768), jnp.bfloat16)
    backend = ops.kernel_backend(example, **ACCUM)
    if not backend.startswith("mosaic"):
        print(f"There is nothing to measure, since kernels are not used: {backend.removeprefix('xla: ')}.")
        return
    rows, claims = [], []
    for name, (function, arguments, passes) in cases().items():
        y = jax.eval_shape(function, *arguments)
        cotangent = jax.random.normal(jax.random.key(1), y.shape, y.dtype)
        programs = compile_forms(function, arguments, cotangent)
        error = gradient_error(function, arguments, cotangent, programs["kernel"](arguments, cotangent)[1][0])
        timers = {form: functools.partial(measure, program, arguments, cotangent) for form, program in programs.items()}
        times = {form: min(each) for form, each in interleave(timers, rounds=rounds).items()}
        ratio = times["kernel"] / times["XLA"]
        rate = passes * arguments[0].nbytes / times["kernel"] / 1e12
        rows.append((name, seconds(times["kernel"]), seconds(times["XLA"]), f"{ratio:.2f}", f"{rate:.1f} TB/s"))
        claims.append((f"{name}: at most {LIMIT} of XLA's time ({ratio:.2f})", ratio <= LIMIT))
        claims.append((f"{name}: an error of the gradient of at most {ERROR} ({error:.1e})", error <= ERROR))
    print_table("Forward and backward pass", ("", "kernel", "XLA", "ratio", "of the fewest bytes"), rows)
    for claim in claims:
        print(verdict(*claim))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
