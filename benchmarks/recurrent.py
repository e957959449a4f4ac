"""A training step of LSTM and GRU, 256 wide, 64 steps of 32 examples, beside PyTorch's: forward, backward and SGD.

    python benchmarks/recurrent.py [python-with-torch] [rounds]    # 2 minutes

PyTorch takes part if a Python that has it is named. It answers from a process of its own, which idles while JAX
computes, and the other way round. "plain scan" is the same cell differentiated by JAX's own rule for scans, which adds
up the weights' gradients step by step.
"""

import os
import statistics
import sys
from functools import partial

from side_by_side import Process, in_turns, seconds, serve, show, turn, verdict

KINDS = ("LSTM", "GRU")
FEATURES, TIMES, BATCH, RATE = 256, 64, 32, 1e-3
CLAIM = 1.2


def peer():
    """Answer each line, the name of a layer, with the seconds of PyTorch's steps."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))

    def training(kind):
        layer = getattr(torch.nn, kind)(FEATURES, FEATURES)
        optimizer = torch.optim.SGD(layer.parameters(), RATE)
        x = torch.randn(TIMES, BATCH, FEATURES)

        def step():
            optimizer.zero_grad()
            y, _ = layer(x)
            (y * y).mean().backward()
            optimizer.step()

        return step

    steps = {kind: training(kind) for kind in KINDS}
    serve(lambda kind: turn(steps[kind]))


def main(python, rounds):
    import jax
    import jax.numpy as jnp
    from rich import print

    import mlax
    from mlax import nn

    @mlax.frozen
    class Plain(mlax.Cell):
        """A cell without its halves."""

        cell: mlax.Cell

        def start(self, x):
            return self.cell.start(x)

        def init(self, rng, x):
            return self.cell.init(rng, x)

        def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
            return self.cell.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)

    def training(cell):
        layer = mlax.Recurrent(cell, axis=0)
        x = jax.random.normal(jax.random.key(0), (TIMES, BATCH, FEATURES))
        held = {"trainables": layer.init(jax.random.key(1), x)[0]}

        @jax.jit
        def update(trainables, x):
            grads = jax.grad(lambda trainables: jnp.mean(jnp.square(layer.fwd(x, trainables)[0])))(trainables)
            return jax.tree.map(lambda leaf, grad: leaf - RATE * grad, trainables, grads)

        def step():
            held["trainables"] = jax.block_until_ready(update(held["trainables"], x))

        return lambda: turn(step)

    torch = Process(python, "--peer") if python else None
    measurements = {}
    for kind, cell in (("LSTM", nn.LSTMCell(FEATURES)), ("GRU", nn.GRUCell(FEATURES))):
        measurements |= {(kind, "mlax"): training(cell), (kind, "plain scan"): training(Plain(cell))}
        if torch:
            measurements[kind, "PyTorch"] = partial(torch.ask, kind)
    in_turns(measurements, rounds=1)  # compiles
    found = in_turns(measurements, rounds=rounds)
    if torch:
        torch.end()

    rows, worst, base = [], 0.0, "PyTorch" if torch else "plain scan"
    for kind, name in found:
        median = {each: statistics.median(map(statistics.median, found[kind, each])) for each in (name, base)}
        best = {each: min(map(min, found[kind, each])) for each in (name, base)}
        ratio = median[name] / median[base]
        worst = max(worst, ratio) if name == "mlax" else worst
        rows.append((f"{kind} {name}", seconds(median[name]), f"{ratio:.2f}", f"{best[name] / best[base]:.2f}", ""))
    show(
        f"Training step, {FEATURES} wide, {TIMES} steps of {BATCH}: {rounds} turns",
        ("", "median", f"over {base}", "best over best", ""),
        rows,
    )
    if torch:
        print(verdict(f"mlax takes at most {CLAIM} of PyTorch's time", worst <= CLAIM))


if __name__ == "__main__":
    if sys.argv[1:] == ["--peer"]:
        peer()
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None, int(sys.argv[2]) if len(sys.argv) > 2 else 15)
