"""A training step of LSTM and GRU, width 256, 64 steps of 32 examples, compared with PyTorch: forward, backward, SGD.

    python benchmarks/recurrent.py [python-with-torch] [rounds]    # 2 minutes

PyTorch takes part if a Python that has it is given. It runs in its own process, which idles while JAX computes, and
vice versa. "plain scan" is the same cell differentiated by JAX's own rule for scans, which accumulates the gradients of
the weights step by step.
"""

import os
import statistics
import sys
from functools import partial

from harness import Process, interleave, print_table, seconds, serve, time_steps, verdict

KINDS = ("LSTM", "GRU")
FEATURES, TIMES, BATCH, RATE = 256, 64, 32, 1e-3
CLAIM = 1.2


def peer():
    """Answer each line, the name of a layer, with the times of PyTorch's steps."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))

    def make_step(kind):
        layer = getattr(torch.nn, kind)(FEATURES, FEATURES)
        optimizer = torch.optim.SGD(layer.parameters(), RATE)
        x = torch.randn(TIMES, BATCH, FEATURES)

        def step():
            optimizer.zero_grad()
            y, _ = layer(x)
            (y * y).mean().backward()
            optimizer.step()

        return step

    steps = {kind: make_step(kind) for kind in KINDS}
    serve(lambda kind: time_steps(steps[kind]))


def main(python, rounds):
    import jax
    import jax.numpy as jnp
    from rich import print

    import mlax
    from mlax import nn

    @mlax.frozen
    class Plain(mlax.Cell):
        """A cell without `ahead`, `feedback` and `step`."""

        cell: mlax.Cell

        def start(self, x):
            return self.cell.start(x)

        def init(self, rng, x):
            return self.cell.init(rng, x)

        def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
            return self.cell.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)

    def make_step(cell):
        layer = mlax.Recurrent(cell, axis=0)
        x = jax.random.normal(jax.random.key(0), (TIMES, BATCH, FEATURES))
        current = {"trainables": layer.init(jax.random.key(1), x)[0]}

        @jax.jit
        def update(trainables, x):
            grads = jax.grad(lambda trainables: jnp.mean(jnp.square(layer.fwd(x, trainables)[0])))(trainables)
            return jax.tree.map(lambda leaf, grad: leaf - RATE * grad, trainables, grads)

        def step():
            current["trainables"] = jax.block_until_ready(update(current["trainables"], x))

        return lambda: time_steps(step)

    torch = Process(python, "--peer") if python else None
    measurements = {}
    for kind, cell in (("LSTM", nn.LSTMCell(FEATURES)), ("GRU", nn.GRUCell(FEATURES))):
        measurements |= {(kind, "mlax"): make_step(cell), (kind, "plain scan"): make_step(Plain(cell))}
        if torch:
            measurements[kind, "PyTorch"] = partial(torch.ask, kind)
    interleave(measurements, rounds=1)  # compiles
    times = interleave(measurements, rounds=rounds)
    if torch:
        torch.close()

    rows, worst, base = [], 0.0, "PyTorch" if torch else "plain scan"
    for kind, name in times:
        median = {each: statistics.median(map(statistics.median, times[kind, each])) for each in (name, base)}
        best = {each: min(map(min, times[kind, each])) for each in (name, base)}
        ratio = median[name] / median[base]
        worst = max(worst, ratio) if name == "mlax" else worst
        rows.append((f"{kind} {name}", seconds(median[name]), f"{ratio:.2f}", f"{best[name] / best[base]:.2f}", ""))
    print_table(
        f"Training step, width {FEATURES}, {TIMES} steps of {BATCH}: {rounds} rounds",
        ("", "median", f"/ {base}", "best / best", ""),
        rows,
    )
    if torch:
        print(verdict(f"mlax takes at most {CLAIM} times as long as PyTorch", worst <= CLAIM))


if __name__ == "__main__":
    if sys.argv[1:] == ["--peer"]:
        peer()
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None, int(sys.argv[2]) if len(sys.argv) > 2 else 15)
