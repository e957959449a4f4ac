"""Claims: on a GPU, int8 kernels take half the memory of bfloat16 and decode about as fast; fp8 products are faster.

"About as fast" is at least 0.9 times the speed at batch 1; fp8 is claimed to be faster at batch 1 and 256, not at 16.
Time and error of bfloat16, int8 and float8_e4m3fn:
- a Linear of 4,096 inputs and 14,336 outputs, the width and the hidden width of a 7B model, at batch 1, 16 and 256.
  Eight kernels follow each other in one program, so that none stays in the GPU's L2 cache. float8 kernels are stored
  as (out, in); a row shows what (in, out) would cost, where XLA transposes the kernel at every call.
- greedy decoding with GPT-2 124M (random weights), at batch 1 and 64, with a KV cache in bfloat16 and in int8.

    python benchmarks/quantized.py    # 3 minutes on a GPU; 1 minute on a CPU, with small sizes and without claims

The error of the Linear is the root mean square of the difference from float32, relative to that of the output.

Measured on an H200 (November 2026, JAX 0.11.2), the Linear's time and its speed relative to bfloat16:
    batch   bfloat16   int8            float8          float8 stored (in, out)
    1       50 us      68 us, 0.74 x   40 us, 1.25 x    96 us, 0.53 x
    16      56 us      51 us, 1.09 x   83 us, 0.67 x    98 us, 0.57 x
    256     75 us      94 us, 0.80 x   57 us, 1.31 x   458 us, 0.16 x
    error   0.17%      0.71%           3.7%
Decoding at batch 1, in tokens a second: bfloat16 1,680; int8 1,597 (0.95 x), with an int8 cache 1,497 (0.89 x); float8
1,278 (0.76 x), measured while its kernels were stored as (in, out), and not since. Batch 64 has not been measured.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import interleave, print_table, seconds, time_steps, verdict
from jax import lax

import mlax
from mlax import nn, ops, zoo

KERNELS = 8
IS_GPU = jax.default_backend() == "gpu"
INPUTS, OUTPUTS = (4096, 14336) if IS_GPU else (256, 512)
BATCHES = (1, 16, 256)
DECODED, ROUNDS = (256, 5) if IS_GPU else (8, 2)
DTYPES = (None, "int8", "float8_e4m3fn")


def main() -> None:
    for batch in BATCHES:
        measure_linear(batch)
    for batch in (1, 64) if IS_GPU else (1, 4):
        measure_decoding(batch)


def measure_linear(batch: int) -> None:
    keys = jax.random.split(jax.random.key(0), KERNELS)
    kernels = [jax.random.normal(key, (INPUTS, OUTPUTS), "bfloat16") for key in keys]
    x = jax.random.normal(jax.random.key(1), (batch, INPUTS), "bfloat16")
    wanted = jnp.dot(x.astype("float32"), kernels[0].astype("float32"), precision="highest")
    forms: dict[str, tuple[Callable[..., Any], Any]] = {"bfloat16": (ops.linear, [(kernel,) for kernel in kernels])}
    layer = nn.Linear(OUTPUTS, bias=False)
    for dtype in DTYPES[1:]:
        codes = [nn.quantize(layer, {"kernel": kernel}, dtype)[1] for kernel in kernels]
        forms[str(dtype)] = ops.quantized_linear, [(each["kernel"], each["scale"]) for each in codes]
    transposed = [(codes.T, scale) for codes, scale in forms["float8_e4m3fn"][1]]
    forms["float8, stored (in, out)"] = multiply_transposed, transposed
    steps, errors = {}, {}
    for name, (product, weights) in forms.items():
        step = jax.jit(functools.partial(apply_all, product)).lower(x, weights).compile()
        steps[name] = functools.partial(time_call, step, x, weights)
        errors[name] = relative_error(product(x, *weights[0]), wanted)
    results = interleave(steps, rounds=10 * ROUNDS)
    times = {name: float(np.median(each)) / KERNELS for name, each in results.items()}
    rows = []
    for name, duration in times.items():
        ratio = times["bfloat16"] / duration
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(forms[name][1][0]))
        claim = ""
        if name == "int8" and IS_GPU:
            claim = verdict("half the memory", size < 0.51 * kernels[0].nbytes)
        elif name == "float8_e4m3fn" and batch in (1, 256) and IS_GPU:
            claim = verdict("faster than bfloat16", ratio > 1)
        rate = f"{size / duration / 1e9:,.0f} GB/s"
        rows.append((name, seconds(duration), f"{ratio:.2f} x", rate, f"{errors[name]:.2%}", claim))
    title = f"Linear bfloat16[{batch}, {INPUTS}] to {OUTPUTS}: medians of {10 * ROUNDS}"
    print_table(title, ("kernel", "time", "speed / bf16", "weights read", "error", "claim"), rows)


def apply_all(product: Callable[..., Any], x: Any, weights: Any) -> Any:
    """The sum of the products with all kernels."""
    return sum(product(x, *each) for each in weights)


def multiply_transposed(x: Any, kernel: Any, scale: Any) -> Any:
    """`ops.quantized_linear` with a float8 kernel that is stored as (in, out)."""
    codes, row_scale = ops.quantize(x, kernel.dtype)
    y = lax.dot_general(codes, kernel, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return (y * row_scale.astype("float32")[:, None] * scale.astype("float32")[None]).astype(x.dtype)


def time_call(function: Callable[..., Any], *arguments: Any) -> float:
    return time_steps(lambda: jax.block_until_ready(function(*arguments)), steps=1)[0]


def relative_error(found: Any, wanted: Any) -> float:
    found, wanted = (np.asarray(each, np.float64) for each in (found, wanted))
    return float(np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)))


def measure_decoding(batch: int) -> None:
    model = zoo.gpt2("small") if IS_GPU else zoo.GPT2(vocabulary=500, positions=64, width=64, depth=2, heads=2)
    prompts = jnp.asarray(np.random.default_rng(0).integers(0, model.vocabulary, (batch, 16)), "int32")
    wide, _ = jax.jit(model.init)(jax.random.key(0), prompts)
    wanted, _ = jax.jit(model.fwd)(prompts, wide)
    trainables = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), wide)
    variants = {"bfloat16": (model, trainables)}
    for dtype in DTYPES[1:]:
        variants[str(dtype)] = nn.quantize(model, trainables, dtype)
    int8_cache = mlax.override(variants["int8"][0], nn.MultiHeadAttention, cache_dtype="int8")
    variants["int8, KV cache too"] = int8_cache, variants["int8"][1]
    steps, errors = {}, {}
    for name, (each, weights) in variants.items():
        generate = functools.partial(zoo.generate, each, weights, prompts, max_new_tokens=DECODED)
        steps[name] = functools.partial(time_call, lambda generate=generate: generate().tokens)
        errors[name] = relative_error(jax.jit(each.fwd)(prompts, weights)[0], wanted)
    results = interleave(steps, rounds=ROUNDS)
    rows, times = [], {name: float(np.median(each)) for name, each in results.items()}
    for name, duration in times.items():
        ratio = times["bfloat16"] / duration
        is_claimed = name == "int8" and batch == 1 and IS_GPU
        claim = verdict("at least 0.9 x of bfloat16", ratio >= 0.9) if is_claimed else ""
        rate = f"{batch * DECODED / duration:,.0f} tokens/s"
        rows.append((name, seconds(duration), f"{ratio:.2f} x", rate, f"{errors[name]:.2%}", claim))
    title = f"Greedy decoding of {DECODED} tokens, batch {batch}: medians of {ROUNDS}"
    print_table(title, ("weights", "time", "speed / bf16", "rate", "error of logits", "claim"), rows)


if __name__ == "__main__":
    main()
