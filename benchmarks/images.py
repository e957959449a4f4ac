"""Claims: the forms of convolutions, pooling and stacks that mlax chooses for images are no slower than the plain ones.

    python benchmarks/images.py [rounds]    # two minutes on a GPU; on a CPU, small poolings only

Each row is a forward and a backward pass: by the form that mlax chooses, and by the plain one in its place. Images are
not differentiated. On a GPU there are 256 of them in bfloat16, on a CPU 32 in float32.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from harness import interleave, print_table, seconds, time_steps, verdict
from rich import print

import mlax
from mlax import dtypes, ops, zoo

LIMIT = 1.05  # of the plain form's time
ON_GPU = jax.default_backend() == "gpu"
BATCH, DTYPE = (256, jnp.bfloat16) if ON_GPU else (32, jnp.float32)
Program = Callable[[], Any]


def cases() -> Iterator[tuple[str, Program, Program]]:
    """Each name, the chosen form and the plain one."""
    for window in (2, 3):
        pool = functools.partial(ops.max_pool, window=window, strides=2, padding=(window - 1) // 2)
        x = draw(BATCH, *((112, 112) if ON_GPU else (28, 28)), 64)
        plain = mock.patch.object(inspect.getmodule(ops.max_pool), "prefers_gathered_pool_grad", return_value=False)
        yield f"max pooling, {window} x {window}, strides of 2", *compile_both(pool, [x], plain)
    if not ON_GPU:
        return
    images = draw(BATCH, 224, 224, 3)
    for window, stride, features in (7, 2, 64), (4, 4, 96), (16, 16, 768):
        conv = functools.partial(ops.conv, images, strides=stride, padding=(window - stride + 1) // 2)
        plain = mock.patch.object(inspect.getmodule(ops.conv), "prefers_folded_strides", return_value=False)
        kernel = draw(features, window, window, 3)
        yield f"convolution, {window} x {window}, strides of {stride}", *compile_both(conv, [kernel], plain)
    for name, model in {
        "ResNet stage": zoo.ResNet(depths=(5,), widths=(256,), classes=None),
        "ConvNeXt stage": zoo.ConvNeXt(depths=(5,), widths=(96,), classes=None),
    }.items():
        unrolled, scanned = (stack(mlax.override(model, mlax.Repeat, mode=mode)) for mode in ("unroll", "scan"))
        yield f"{name} of 5 blocks, unrolled beside scanned", unrolled, scanned


def draw(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape, DTYPE)


def compile_both(function: Any, arguments: list[Any], plain: Any) -> tuple[Program, Program]:
    chosen = compile_passes(function, arguments)
    with plain:
        return chosen, compile_passes(function, arguments)


def compile_passes(function: Any, arguments: list[Any]) -> Program:
    """A program without arguments of the value and the gradients."""
    y = jax.eval_shape(function, *arguments)
    cotangent = draw(*y.shape).astype(y.dtype)

    def run(arguments: Any, cotangent: Any) -> Any:
        y, pull_back = jax.vjp(function, *arguments)
        return y, pull_back(cotangent)

    return functools.partial(jax.jit(run).lower(arguments, cotangent).compile(), arguments, cotangent)


def stack(model: Any) -> Program:
    mixed, images = dtypes.mixed_bfloat16(model), draw(BATCH, 224, 224, 3).astype(jnp.float32)
    trainables, state = jax.jit(mixed.init)(jax.random.key(0), images)
    return compile_passes(lambda trainables: mixed.fwd(images, trainables, state)[0], [trainables])


def main(rounds: int) -> None:
    rows, claims = [], []
    for name, chosen, plain in cases():
        timers = {
            form: lambda program=program: min(time_steps(lambda: jax.block_until_ready(program()), 10))
            for form, program in (("chosen", chosen), ("plain", plain))
        }
        times = {form: min(each) for form, each in interleave(timers, rounds=rounds).items()}
        ratio = times["chosen"] / times["plain"]
        rows.append((name, seconds(times["chosen"]), seconds(times["plain"]), f"{ratio:.2f}"))
        claims.append((f"{name}: at most {LIMIT} of the plain form's time ({ratio:.2f})", ratio <= LIMIT))
    print_table("Forward and backward pass", ("", "chosen", "plain", "ratio"), rows)
    for claim in claims:
        print(verdict(*claim))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
