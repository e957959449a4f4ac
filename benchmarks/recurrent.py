"""A training step of LSTM and GRU, 256 wide, 64 steps of 32 examples, beside PyTorch's: forward, backward and SGD.

    python benchmarks/recurrent.py path/to/a/python/with/torch [rounds]

PyTorch answers from a process of its own, which idles while JAX computes, and the other way round. "plain scan" is the
same cell differentiated by JAX's own rule for scans, which adds up the weights' gradients step by step.
Takes 2 minutes.
"""

import json
import os
import statistics
import subprocess
import sys
import time

KINDS = ("LSTM", "GRU")
FEATURES, TIMES, BATCH, RATE = 256, 64, 32, 1e-3
STEPS = 5  # in a turn
CLAIM = 1.2


def turn(step):
    """The seconds of each of some steps, after one that does not count."""
    step()
    taken = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return taken


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
    for line in sys.stdin:
        print(json.dumps(turn(steps[line.strip()])), flush=True)


def main(python, rounds):
    import jax
    import jax.numpy as jnp
    from side_by_side import in_turns, seconds, show, verdict

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
        def update(trainables):
            grads = jax.grad(lambda trainables: jnp.mean(jnp.square(layer.fwd(x, trainables)[0])))(trainables)
            return jax.tree.map(lambda leaf, grad: leaf - RATE * grad, trainables, grads)

        def step():
            held["trainables"] = jax.block_until_ready(update(held["trainables"]))

        return lambda: turn(step)

    torch = subprocess.Popen(
        [python, __file__, "--peer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )

    def asked(kind):
        def ask():
            print(kind, file=torch.stdin)
            taken = json.loads(torch.stdout.readline())
            time.sleep(0.25)  # its threads look for more work for a while
            return taken

        return ask

    measurements = {}
    for kind, cell in (("LSTM", nn.LSTMCell(FEATURES)), ("GRU", nn.GRUCell(FEATURES))):
        measurements |= {
            (kind, "PyTorch"): asked(kind),
            (kind, "mlax"): training(cell),
            (kind, "plain scan"): training(Plain(cell)),
        }
    in_turns(measurements, rounds=1)  # compiles
    found = in_turns(measurements, rounds=rounds)
    torch.stdin.close()
    torch.wait()

    rows, worst = [], 0.0
    for kind in KINDS:
        peers = [statistics.median(taken) for taken in found[kind, "PyTorch"]]
        for name in ("PyTorch", "mlax", "plain scan"):
            each = [statistics.median(taken) for taken in found[kind, name]]
            ratio = statistics.median(each) / statistics.median(peers)
            best = min(map(min, found[kind, name])) / min(map(min, found[kind, "PyTorch"]))
            worst = max(worst, ratio) if name == "mlax" else worst
            rows.append((f"{kind} {name}", seconds(statistics.median(each)), f"{ratio:.2f}", f"{best:.2f}", ""))
    show(
        f"Training step, {FEATURES} wide, {TIMES} steps of {BATCH}: {rounds} turns of {STEPS}",
        ("", "median", "over PyTorch", "best over best", ""),
        rows,
    )
    print(verdict(f"mlax takes at most {CLAIM} of PyTorch's time", worst <= CLAIM))


if __name__ == "__main__":
    if sys.argv[1:] == ["--peer"]:
        peer()
    else:
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 15)
