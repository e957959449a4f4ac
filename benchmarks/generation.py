"""Claim: on a GPU, zoo.generate decodes GPT-2 at least as fast as a scan written by hand, at batch 1 and at batch 64.

    python benchmarks/generation.py                                  # on a GPU: two minutes; on a CPU a small model
    python benchmarks/generation.py --batch 64 --tokens 512          # one batch
    python benchmarks/generation.py --batch 1 --profile /tmp/trace   # traces, and the time of each kernel

Greedy decoding with GPT-2 124M in bfloat16, random weights, 512 new tokens after a prompt of 128. A row each:
- scan by hand: one jitted scan over tokens, a cache for each layer in its carry, one product for query, key and value,
  weights in bfloat16. Its cache is (b, h, s, k), or (b, s, h, k), or that with attention as products and sums.
- zoo.generate from float32 weights (mixed_bfloat16), from unstacked ones in bfloat16, and that with a stop token;
  with kernels of its own, for GPUs of Hopper, and without them. zoo.decoding_backend says which of the two it chooses.
That all of them produce the same tokens is checked in float32 with a small model first. This is about the forms of
mlax's own program; `python -m benchmarks gpu --only decode-b1 decode-b64` compares it with transformers.
"""

import argparse
import functools
import glob
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import interleave, print_table, seconds, time_steps, verdict
from jax import lax
from rich import print

import mlax
from mlax import dtypes, zoo

IS_GPU = jax.default_backend() == "gpu"
SMALL = zoo.GPT2(vocabulary=311, positions=128, width=64, depth=3, heads=4)
MODEL = zoo.gpt2("small") if IS_GPU else SMALL
DTYPE = jnp.bfloat16 if IS_GPU else jnp.float32
ATTENTION = ("bhsk", "bshk", "reduce")
UNREACHABLE = -1  # a stop token that no row produces


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 64] if IS_GPU else [2])
    parser.add_argument("--prompt", type=int, default=128 if IS_GPU else 9)
    parser.add_argument("--tokens", type=int, default=512 if IS_GPU else 24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="parts of the names of rows")
    parser.add_argument("--profile", help="a folder for traces")
    options = parser.parse_args()
    check_tokens()
    for batch in options.batch:
        print(f"batch {batch}: {describe_backend(batch)}")
        programs = all_programs(MODEL, batch, options.prompt, options.tokens, DTYPE)
        if options.only:
            programs = {name: run for name, run in programs.items() if any(part in name for part in options.only)}
        measure(programs, batch, options)
        if options.profile:
            for name, run in programs.items():
                profile(
                    f"{options.profile}/{batch}/{name.replace(' ', '_').replace(':', '')}", name, run, options.tokens
                )


def describe_backend(batch: int) -> str:
    model = dtypes.mixed_bfloat16(MODEL)
    trainables, _ = jax.jit(MODEL.init)(jax.random.key(0), MODEL.example_input())
    return zoo.decoding_backend(model, trainables, batch=batch)


def check_tokens() -> None:
    """Raise unless all programs produce the same tokens in float32."""
    programs = all_programs(SMALL, 3, 9, 24, jnp.float32)
    tokens = {name: np.asarray(run()) for name, run in programs.items()}
    first, *others = tokens
    for name in others:
        np.testing.assert_array_equal(tokens[name], tokens[first], err_msg=f"{name} and {first} differ")
    print(f"{len(tokens)} programs produce the same tokens: {tokens[first][0, :8]}...")


def measure(programs: dict[str, Any], batch: int, options: argparse.Namespace) -> None:
    compiled = {name: time_steps(run, 0) for name, run in programs.items()}
    del compiled
    timers = {name: functools.partial(lambda run: time_steps(run, 1)[0], run) for name, run in programs.items()}
    times = {name: statistics.median(each) for name, each in interleave(timers, rounds=options.rounds).items()}
    rows = [
        (name, seconds(time), seconds(time / options.tokens), f"{batch * options.tokens / time:,.0f}")
        for name, time in times.items()
    ]
    title = f"Greedy decoding, batch {batch}, {options.prompt} + {options.tokens} tokens: medians of {options.rounds}"
    print_table(title, ("", "time", "a token", "tokens/s"), rows)
    ours = [time for name, time in times.items() if name.startswith("zoo")]
    theirs = [time for name, time in times.items() if name.startswith("scan")]
    if ours and theirs:
        print(verdict(f"zoo.generate is as fast as the fastest scan at batch {batch}", min(ours) <= 1.02 * min(theirs)))


def all_programs(model: zoo.GPT2, batch: int, prompt: int, tokens: int, dtype: Any) -> dict[str, Any]:
    trainables, _ = jax.jit(model.init)(jax.random.key(0), model.example_input())
    # larger than at initialization, or the tokens hardly depend on the text
    trainables = jax.tree.map(lambda leaf: leaf * 12 if leaf.ndim > 2 else leaf, trainables)
    prompts = jax.random.randint(jax.random.key(1), (batch, prompt), 0, model.vocabulary, "int32")
    mixed = dtypes.mixed_bfloat16(model) if dtype == jnp.bfloat16 else model
    apart, weights = mlax.unstack(mixed, dtypes.cast(trainables, dtype))
    by_hand = weights_by_hand(model, dtypes.cast(trainables, dtype))
    generate = functools.partial(zoo.generate, max_new_tokens=tokens)

    def scan(attention: str) -> Any:
        return jax.block_until_ready(decode_by_hand(model, tokens, attention, by_hand, prompts))

    def ours(model: Any, weights: Any, **options: Any) -> Any:
        return jax.block_until_ready(generate(model, weights, prompts, **options).tokens)

    return {
        **{f"scan by hand: {each}": functools.partial(scan, each) for each in ATTENTION},
        "zoo.generate: stacked": functools.partial(ours, mixed, trainables),
        "zoo.generate: unstacked": functools.partial(ours, apart, weights),
        "zoo.generate: stop token": functools.partial(ours, apart, weights, stop=UNREACHABLE),
        "XLA alone: zoo.generate": functools.partial(generate_fused, "projections", apart, tokens, weights, prompts),
        "kernels: zoo.generate": functools.partial(generate_fused, "kernels", apart, tokens, weights, prompts),
    }


def generate_fused(fuse: Any, model: Any, tokens: int, weights: Any, prompts: Any) -> Any:
    """`zoo.generate` with or without kernels of mlax, whatever it would choose; float32 has none."""
    settings = zoo.Settings(model, tokens, zoo.Greedy(), "right", 0, False, fuse)
    arguments = (weights, None, prompts, None, (), {}, np.zeros(0, np.int32), None)
    return jax.block_until_ready(zoo.generate_tokens(settings, *arguments).tokens)


def weights_by_hand(model: zoo.GPT2, trainables: Any) -> Any:
    """A tuple of layers, each with one kernel for query, key and value."""
    stacked = trainables["blocks"]["stacked"]

    def layer(i: int) -> Any:
        block = jax.tree.map(lambda leaf: leaf[i], stacked)
        qkv = [block["attend"][name] for name in ("query", "key", "value")]
        joined = {leaf: jnp.concatenate([each[leaf] for each in qkv], axis=-1) for leaf in ("kernel", "bias")}
        return {**block, "qkv": joined, "out": block["attend"]["out"], "attend": None}

    layers = tuple(layer(i) for i in range(model.depth))
    return {**{name: trainables[name] for name in ("embed", "positions", "norm")}, "layers": layers}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def decode_by_hand(model: zoo.GPT2, tokens: int, attention: str, weights: Any, prompts: Any) -> Any:
    b, t = prompts.shape
    h, k = model.heads, model.width // model.heads
    slots = -(-(t + tokens) // 64) * 64
    time_axis = 2 if attention == "bhsk" else 1
    shape = (b, h, slots, k) if attention == "bhsk" else (b, slots, h, k)
    empty = jnp.zeros(shape, weights["embed"]["table"].dtype)

    def forward(tokens: Any, start: Any, caches: Any) -> Any:  # (b, t)
        places = start + jnp.arange(tokens.shape[1])
        x = weights["embed"]["table"][tokens] + weights["positions"]["table"][places]
        visible = places[:, None] >= jnp.arange(slots)[None]  # (t, s)
        new = []
        for layer, (keys, values) in zip(weights["layers"], caches, strict=True):
            qkv = linear(layer_norm(x, layer["norm1"]), layer["qkv"])
            query, key, value = (each.reshape(b, -1, h, k) for each in jnp.split(qkv, 3, axis=-1))
            if attention == "bhsk":
                key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
            keys = lax.dynamic_update_slice_in_dim(keys, key, start, time_axis)
            values = lax.dynamic_update_slice_in_dim(values, value, start, time_axis)
            new.append((keys, values))
            y = attend(query, keys, values, visible, attention)
            x = x + linear(y.reshape(b, -1, h * k), layer["out"])
            x = x + linear(jax.nn.gelu(linear(layer_norm(x, layer["norm2"]), layer["up"])), layer["down"])
        x = layer_norm(x[:, -1], weights["norm"])
        return jnp.argmax(x @ weights["embed"]["table"].T, axis=-1).astype(jnp.int32), tuple(new)

    def step(carry: Any, _: Any) -> Any:
        token, place, caches = carry
        following, caches = forward(token[:, None], place, caches)
        return (following, place + 1, caches), following

    first, caches = forward(prompts, 0, ((empty, empty),) * model.depth)
    _, others = lax.scan(step, (first, jnp.int32(t), caches), length=tokens - 1)
    return jnp.concatenate([first[:, None], others.T], axis=1)


def attend(query: Any, keys: Any, values: Any, visible: Any, attention: str) -> Any:  # (b, t, h, k), ..., (t, s)
    scale = query.shape[-1] ** -0.5
    if attention == "reduce" and query.shape[1] == 1:
        wide = jnp.float32
        scores = (query.astype(wide) * keys.astype(wide)).sum(-1) * scale  # (b, s, h)
        weights = jax.nn.softmax(jnp.where(visible[0][None, :, None], scores, -jnp.inf), axis=1)
        return (weights[..., None] * values.astype(wide)).sum(1, keepdims=True).astype(query.dtype)
    stored = "bhsk" if attention == "bhsk" else "bshk"
    scores = jnp.einsum(f"bthk,{stored}->bhts", query, keys, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(query.dtype)
    return jnp.einsum(f"bhts,{stored}->bthk", weights, values)


def linear(x: Any, weights: Any) -> Any:
    return x @ weights["kernel"] + weights["bias"]


def layer_norm(x: Any, weights: Any) -> Any:
    wide = x.astype(jnp.float32)
    mean, var = wide.mean(-1, keepdims=True), wide.var(-1, keepdims=True)
    return ((wide - mean) * lax.rsqrt(var + 1e-5)).astype(x.dtype) * weights["scale"] + weights["shift"]


def profile(folder: str, name: str, run: Any, tokens: int) -> None:
    """Write a trace, and print the kernels that take most of the time."""
    with jax.profiler.trace(folder):
        run()
    durations: dict[str, list[float]] = {}
    for path in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            if "/device:" in plane.name or (not IS_GPU and "CPU" in plane.name):
                for line in plane.lines:
                    if line.name.startswith("Stream") or not IS_GPU:
                        for event in line.events:
                            durations.setdefault(event.name, []).append(event.duration_ns / 1e9)
    total = sum(map(sum, durations.values())) or 1.0
    largest = sorted(durations.items(), key=lambda item: -sum(item[1]))[:30]
    number = sum(map(len, durations.values()))
    rows = [
        (kernel[:60], f"{len(each) / tokens:.1f}", seconds(sum(each) / tokens), f"{sum(each) / total:.1%}")
        for kernel, each in largest
    ]
    title = f"{name}: {seconds(total / tokens)} in {number / tokens:.0f} kernels a token"
    print_table(title, ("kernel", "a token", "time a token", "share"), rows)


if __name__ == "__main__":
    main()
