"""Claim: a model whose weights and slots are 3 times the memory that JAX may use trains at half the resident speed.

    python benchmarks/stream.py                                    # 4 minutes on an H200
    python benchmarks/stream.py --depth 4 --width 64 --heads 4 --batch 2 --length 32 --limit 0      # on a CPU

A GPT in bfloat16 with float32 master weights takes the same steps twice, each time in a process of its own: with
`place.Stream` under a limit of the device's memory, and resident with none. Printed are the losses, the seconds of a
step, the bytes that a step moves between host and device, as counted from the leaves, and the most that was allocated
on the device. Of what is moved, each weight is fetched forward and backward, its gradient written, read for the norm
and read for the update, and each slot read and written with the weight. The inputs of the layers go there and back.
Both kinds compute the layers again in the backward pass.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

GIB = 2**30


def main(options: argparse.Namespace) -> None:
    from rich import print
    from side_by_side import show, verdict

    streamed, resident = (ask(options, kind) for kind in ("streamed", "resident"))
    rows = [
        (
            kind,
            f"{found['seconds']:.2f} s",
            f"{found['tokens'] / found['seconds']:,.0f}",
            f"{found['peak'] / GIB:.1f} GiB" if found["peak"] else "not told",
            f"{found['state'] / GIB:.1f} GiB",
            " ".join(f"{loss:.4f}" for loss in found["losses"]),
        )
        for kind, found in (("streamed", streamed), ("resident", resident))
    ]
    show("A training step", ("", "a step", "tokens/s", "peak on device", "weights and slots", "losses"), rows)
    show(
        "What a streamed step moves",
        ("", "bytes", "over the whole step"),
        [
            (way, f"{streamed[way] / GIB:.1f} GiB", f"{streamed[way] / streamed['seconds'] / 1e9:.0f} GB/s")
            for way in ("to device", "to host")
        ],
    )
    ratio = streamed["seconds"] / resident["seconds"]
    apart = max(abs(a - b) / b for a, b in zip(streamed["losses"], resident["losses"], strict=True))
    print(verdict(f"streamed takes {ratio:.2f} times as long as resident, at most 2", ratio <= 2))
    print(verdict(f"the losses are {apart:.2%} apart, at most 1%", apart <= 0.01))
    if streamed["limit"] and options.limit:
        larger = streamed["state"] / streamed["limit"]
        print(verdict(f"weights and slots are {larger:.1f} times the limit of the device's memory", larger >= 3))


def ask(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """What a process of its own measured."""
    environment = dict(os.environ, XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB="110")
    if options.limit:
        part = options.limit * GIB / options.memory if kind == "streamed" else 0.93
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{part:.4f}"
    if options.limit and kind == "streamed":
        # in a CUDA graph, which a command buffer is, the copies wait for the computation and it for them
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    run = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--kind", kind], env=environment, stdout=subprocess.PIPE, text=True
    )
    if run.returncode:
        raise SystemExit(f"the {kind} run ended with {run.returncode}")
    return json.loads(run.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The steps of one kind."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import mlax
    from mlax import nn, optim, place, train

    statistics_in = {"accum_dtype": "float32"}
    began = time.perf_counter()

    def note(words: str) -> None:
        print(f"{options.kind}: {words} after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)

    block = mlax.Series(
        attend=mlax.Residual(
            mlax.Series(
                norm=nn.RMSNorm(**statistics_in),
                attend=nn.MultiHeadAttention(options.heads, causal=True, rotary=nn.Rotary(), bias=False),
            )
        ),
        think=mlax.Residual(
            mlax.Series(norm=nn.RMSNorm(**statistics_in), think=nn.MLP((4 * options.width, options.width), bias=False))
        ),
    )
    blocks = mlax.Repeat(block, options.depth, mode="remat")
    model = mlax.Series(
        embed=nn.Embed(options.vocabulary, options.width, param_dtype="bfloat16"),
        blocks=place.Stream(blocks, inputs_in_host=True) if options.kind == "streamed" else blocks,
        norm=nn.RMSNorm(**statistics_in),
        head=nn.Linear(options.vocabulary, bias=False),
    )

    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        logits, new = model.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"])
        return losses.mean(-1), new

    step = train.step(objective, optim.AdamW(1e-4, rounding=optim.MasterWeights()))
    draws = np.random.default_rng(0)
    tokens = draws.zipf(1.5, (options.steps, options.batch, options.length + 1)) % options.vocabulary
    variables = model.init(jax.random.key(0), tokens[0, :, :-1].astype(np.int32))
    jax.block_until_ready(variables)
    note("weights")
    state = step.init(jax.random.key(1), *variables)
    jax.block_until_ready(state)
    note("slots")
    hosted = [leaf for leaf in jax.tree.leaves(state.trainables) if leaf.sharding.memory_kind == "pinned_host"]
    weights = sum(leaf.nbytes for leaf in hosted)
    kept = jax.tree.leaves(state.optimizer)
    slots = sum(leaf.nbytes for leaf in kept if leaf.sharding.memory_kind == "pinned_host")
    size = sum(leaf.nbytes for leaf in (*jax.tree.leaves(state.trainables), *kept))
    inputs = options.depth * options.batch * options.length * options.width * 2 if hosted else 0
    losses, took = [], []
    for each in tokens.astype(np.int32):
        batch = {"x": each[:, :-1], "y": each[:, 1:]}
        start = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        took.append(time.perf_counter() - start)
        note(f"a step of {took[-1]:.2f} s, loss {losses[-1]:.4f},")
    told = jax.devices()[0].memory_stats() or {}
    return {
        "seconds": statistics.median(took[2:]),  # the first compiles, the second touches new memory
        "tokens": options.batch * options.length,
        "losses": losses,
        "peak": told.get("peak_bytes_in_use", 0),
        "limit": told.get("bytes_limit", 0),
        "state": size,
        "to device": 4 * weights + slots + inputs,
        "to host": 2 * weights + slots + inputs,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"depth": 36, "width": 3072, "heads": 24, "vocabulary": 8192, "batch": 56, "length": 1024, "steps": 5}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--limit", type=float, default=15.3, help="GiB of the device for the streamed run; 0: all")
    parser.add_argument("--memory", type=float, default=150.1e9, help="bytes that the device has")
    parser.add_argument("--kind", choices=("streamed", "resident"), help="measure this one here")
    given = parser.parse_args()
    if given.kind:
        print(json.dumps(measure(given)))
    else:
        main(given)
