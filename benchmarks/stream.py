"""Claim: a model whose weights and slots are 3 times the memory that JAX may use trains at half the resident speed.

    python benchmarks/stream.py                                    # 4 minutes on an H200
    python benchmarks/stream.py --depth 4 --width 64 --heads 4 --batch 2 --length 32 --limit 0      # on a CPU

A GPT in bfloat16 with float32 master weights trains for the same steps twice, each in its own process: with
`place.Stream` under a device memory limit, and resident without one. It prints the losses, the seconds per step, the
bytes transferred between host and device per step, as counted from the leaves, and the peak memory of the device. Each
weight is fetched in the forward and in the backward pass, its gradient is written, read for the norm and read for the
update, and each slot is read and written with its weight. The inputs of the layers are offloaded and fetched back. Both
variants rematerialize the layers in the backward pass.
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
    from harness import print_table, verdict
    from rich import print

    streamed, resident = (run_variant(options, kind) for kind in ("streamed", "resident"))
    rows = [
        (
            kind,
            f"{result['seconds']:.2f} s",
            f"{result['tokens'] / result['seconds']:,.0f}",
            f"{result['peak'] / GIB:.1f} GiB" if result["peak"] else "unknown",
            f"{result['state'] / GIB:.1f} GiB",
            " ".join(f"{loss:.4f}" for loss in result["losses"]),
        )
        for kind, result in (("streamed", streamed), ("resident", resident))
    ]
    print_table(
        "A training step", ("", "per step", "tokens/s", "peak device memory", "weights and slots", "losses"), rows
    )
    print_table(
        "Transfers of a streamed step",
        ("", "bytes", "bandwidth"),
        [
            (
                direction,
                f"{streamed[direction] / GIB:.1f} GiB",
                f"{streamed[direction] / streamed['seconds'] / 1e9:.0f} GB/s",
            )
            for direction in ("to device", "to host")
        ],
    )
    ratio = streamed["seconds"] / resident["seconds"]
    difference = max(abs(a - b) / b for a, b in zip(streamed["losses"], resident["losses"], strict=True))
    print(verdict(f"streamed takes {ratio:.2f} times as long as resident, at most 2", ratio <= 2))
    print(verdict(f"the losses differ by {difference:.2%}, at most 1%", difference <= 0.01))
    if streamed["limit"] and options.limit:
        ratio = streamed["state"] / streamed["limit"]
        print(verdict(f"weights and slots are {ratio:.1f} times the device memory limit", ratio >= 3))


def run_variant(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Measure one variant in its own process."""
    environment = dict(os.environ, XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB="110")
    if options.limit:
        fraction = options.limit * GIB / options.memory if kind == "streamed" else 0.93
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{fraction:.4f}"
    if options.limit and kind == "streamed":
        # in a CUDA graph, which a command buffer is, copies and computation do not overlap
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    run = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--kind", kind], env=environment, stdout=subprocess.PIPE, text=True
    )
    if run.returncode:
        raise SystemExit(f"the {kind} run exited with {run.returncode}")
    return json.loads(run.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the steps of one variant."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import mlax
    from mlax import nn, optim, place, train

    wide = {"accum_dtype": "float32"}
    begin = time.perf_counter()

    def log(message: str) -> None:
        print(f"{options.kind}: {message} after {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)

    block = mlax.Series(
        attend=mlax.Residual(
            mlax.Series(
                norm=nn.RMSNorm(**wide),
                attend=nn.MultiHeadAttention(options.heads, causal=True, rotary=nn.Rotary(), bias=False),
            )
        ),
        think=mlax.Residual(
            mlax.Series(norm=nn.RMSNorm(**wide), think=nn.MLP((4 * options.width, options.width), bias=False))
        ),
    )
    blocks = mlax.Repeat(block, options.depth, mode="remat")
    model = mlax.Series(
        embed=nn.Embed(options.vocabulary, options.width, param_dtype="bfloat16"),
        blocks=place.Stream(blocks, inputs_in_host=True) if options.kind == "streamed" else blocks,
        norm=nn.RMSNorm(**wide),
        head=nn.Linear(options.vocabulary, bias=False),
    )

    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        logits, new = model.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"])
        return losses.mean(-1), new

    step = train.step(objective, optim.AdamW(1e-4, rounding=optim.MasterWeights()))
    generator = np.random.default_rng(0)
    tokens = generator.zipf(1.5, (options.steps, options.batch, options.length + 1)) % options.vocabulary
    variables = model.init(jax.random.key(0), tokens[0, :, :-1].astype(np.int32))
    jax.block_until_ready(variables)
    log("weights")
    state = step.init(jax.random.key(1), *variables)
    jax.block_until_ready(state)
    log("slots")
    offloaded = [leaf for leaf in jax.tree.leaves(state.trainables) if leaf.sharding.memory_kind == "pinned_host"]
    weights = sum(leaf.nbytes for leaf in offloaded)
    slot_leaves = jax.tree.leaves(state.optimizer)
    slots = sum(leaf.nbytes for leaf in slot_leaves if leaf.sharding.memory_kind == "pinned_host")
    size = sum(leaf.nbytes for leaf in (*jax.tree.leaves(state.trainables), *slot_leaves))
    inputs = options.depth * options.batch * options.length * options.width * 2 if offloaded else 0
    losses, durations = [], []
    for each in tokens.astype(np.int32):
        batch = {"x": each[:, :-1], "y": each[:, 1:]}
        start = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        durations.append(time.perf_counter() - start)
        log(f"a step of {durations[-1]:.2f} s, loss {losses[-1]:.4f},")
    memory = jax.devices()[0].memory_stats() or {}
    return {
        "seconds": statistics.median(durations[2:]),  # the first compiles, the second touches new memory
        "tokens": options.batch * options.length,
        "losses": losses,
        "peak": memory.get("peak_bytes_in_use", 0),
        "limit": memory.get("bytes_limit", 0),
        "state": size,
        "to device": 4 * weights + slots + inputs,
        "to host": 2 * weights + slots + inputs,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"depth": 36, "width": 3072, "heads": 24, "vocabulary": 8192, "batch": 56, "length": 1024, "steps": 5}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--limit", type=float, default=15.3, help="GiB of device memory for the streamed run; 0: no limit"
    )
    parser.add_argument("--memory", type=float, default=150.1e9, help="bytes of device memory")
    parser.add_argument("--kind", choices=("streamed", "resident"), help="run this variant in this process")
    parsed = parser.parse_args()
    if parsed.kind:
        print(json.dumps(measure(parsed)))
    else:
        main(parsed)
