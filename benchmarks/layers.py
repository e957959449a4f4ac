"""Claims: on a CPU, a GELU MLP block and the training step of a small CNN are no slower than PyTorch's.

And the other layers of mlax, forward and in training, beside those of PyTorch, Flax NNX and Equinox, with a list of
where mlax loses. All compute the same thing in float32, but for Flax's norms, whose variance is by default the less
exact mean(x^2) - mean(x)^2.

    python benchmarks/layers.py [python-with-torch] [names...] [--rounds N]    # 10 minutes; names as "Conv"

A training step is the output, and the gradients of weights and input from a given gradient of the output; that of the
CNN has a loss and SGD instead. All run in training mode; weights and inputs are arguments, so that nothing is folded,
and all results are made in memory. Each library is used as its documentation has it (layer_peers), PyTorch eagerly,
since its compiler is a library of its own, and with images in its channels-last format. PyTorch answers from a process
of its own, which idles while JAX computes, and the other way round. On a GPU both use it.
"""

import argparse
import importlib
import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from side_by_side import Process, in_turns, seconds, serve, show, turn, verdict

SHAPES = {  # of the inputs, with channels last, and for LSTM and GRU the time first
    "Linear": (256, 512),
    "Linear, 3 axes": (16, 64, 512),
    "GELU MLP": (16, 64, 256),
    "Embed": (64, 256),
    "Conv": (32, 28, 28, 32),
    "Conv, strided": (32, 56, 56, 32),
    "Conv, depthwise": (32, 28, 28, 64),
    "ConvTranspose": (32, 14, 14, 64),
    "MaxPool 2/2": (32, 56, 56, 64),
    "MaxPool 3/2": (32, 56, 56, 64),
    "MeanPool": (32, 56, 56, 64),
    "BatchNorm": (32, 28, 28, 64),
    "LayerNorm": (16, 256, 512),
    "RMSNorm": (16, 256, 512),
    "GroupNorm": (32, 28, 28, 64),
    "Dropout": (16, 256, 512),
    "Attention": (8, 256, 256),
    "Attention, grouped": (8, 256, 256),
    "Rotary": (8, 512, 8, 64),
    "LSTM": (64, 32, 256),
    "GRU": (64, 32, 256),
    "CNN": (128, 28, 28, 1),
}
CLAIMS = {"GELU MLP": "a GELU MLP block", "CNN": "the training step of a CNN"}
PEERS = {"PyTorch": "torch", "Flax": "flax", "Equinox": "equinox"}
LOSES = 1.05
RATE = 1e-3
KINDS = {"forward": "Forward", "training": "Training step"}


def main(names: list[str], torch_python: str | None, rounds: int) -> None:
    from rich import print

    torch = Process(torch_python, "--peer") if torch_python else None
    times = {name: measured(name, torch, rounds) for name in names}
    if torch:
        torch.end()
    losses, ratios = [], {}
    for kind, title in KINDS.items():
        rows = []
        for name in names:
            own = times[name][kind, "mlax"]
            for peer in PEERS:
                ratio = ratios[kind, name, peer] = own / times[name].get((kind, peer), math.nan)
                if ratio > LOSES:
                    losses.append(f"{name} ({kind}) to {peer}, {ratio:.2f}")
            shape = " x ".join(map(str, SHAPES[name]))
            rows.append((name, seconds(own), *(ratio_of(ratios[kind, name, peer]) for peer in PEERS), shape))
        show(
            f"{title}, time of mlax, and as a ratio to its peers' (below 1: mlax is faster): medians of {rounds} turns",
            ("layer", "mlax", *(f"/ {peer}" for peer in PEERS), "input"),
            rows,
        )
    print("mlax loses:", *(losses or ["nowhere"]), sep="\n  ")
    for name, words in CLAIMS.items():
        ratio = ratios.get(("training", name, "PyTorch"), math.nan)
        if not math.isnan(ratio):
            print(verdict(f"{words} is no slower than PyTorch's ({ratio:.2f})", ratio <= LOSES))


def measured(name: str, torch: Process | None, rounds: int) -> dict[tuple[str, str], float]:
    """The median seconds of each kind and library, taking turns."""
    measurements: dict[tuple[str, str], Callable[[], list[float]]] = {}
    for library, steps in {"mlax": jax_steps("mlax", name), **jax_peers(name)}.items():
        measurements |= {(kind, library): partial(turn, step) for kind, step in steps.items()}
    if torch:
        measurements |= {(kind, "PyTorch"): partial(torch.ask, f"{kind} {name}") for kind in KINDS}
    in_turns(measurements, rounds=1)  # compiles
    found = in_turns(measurements, rounds=rounds)
    return {which: statistics.median(map(statistics.median, turns)) for which, turns in found.items()}


def jax_peers(name: str) -> dict[str, Any]:
    """The steps of each peer on JAX that is installed and has such a layer."""
    found = {}
    for peer in ("Flax", "Equinox"):
        try:
            found[peer] = jax_steps(PEERS[peer], name)
        except (ModuleNotFoundError, KeyError):
            continue
    return found


def jax_steps(library: str, name: str) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp

    call, weights, rest, x = importlib.import_module(f"layer_peers.of_{library}").build(name, input_of(name))
    x = jnp.asarray(x)
    held = {"weights": weights}

    @jax.jit
    def gradients(weights, rest, x, y_grad):
        if jnp.issubdtype(x.dtype, jnp.integer):
            y, pull, rest = jax.vjp(lambda weights: call(weights, rest, x), weights, has_aux=True)
        else:
            y, pull, rest = jax.vjp(lambda weights, x: call(weights, rest, x), weights, x, has_aux=True)
        return y, rest, pull(y_grad)

    @partial(jax.jit, donate_argnums=0)
    def update(weights, rest, x, labels):
        def loss(weights):
            logits, new = call(weights, rest, x)
            gold = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
            return jnp.mean(jax.nn.logsumexp(logits, 1) - gold), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(weights)
        return jax.tree.map(lambda weight, grad: weight - RATE * grad, weights, grads), new, value

    def train():
        held["weights"], _, value = update(held["weights"], rest, x, labels)
        return jax.block_until_ready((held["weights"], value))

    forward = jax.jit(call)
    labels = labels_of(name)
    ones = jax.tree.map(lambda y: jnp.ones(y.shape, y.dtype), jax.eval_shape(call, weights, rest, x)[0])
    return {
        "forward": lambda: jax.block_until_ready(forward(held["weights"], rest, x)),
        "training": train
        if labels is not None
        else lambda: jax.block_until_ready(gradients(held["weights"], rest, x, ones)),
    }


def input_of(name: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    if name == "Embed":
        return rng.integers(0, 8192, SHAPES[name], np.int32)
    return rng.standard_normal(SHAPES[name], np.float32)


def labels_of(name: str) -> np.ndarray | None:
    return np.random.default_rng(1).integers(0, 10, SHAPES[name][0], np.int32) if name == "CNN" else None


def peer() -> None:
    """Answer each line, a kind and the name of a layer, with the seconds of PyTorch's steps."""
    from layer_peers.of_torch import LAYERS, build

    steps: dict[str, Any] = {}

    def measure(line: str) -> list[float]:
        kind, name = line.split(" ", 1)
        if name not in LAYERS:
            return [math.nan]
        if name not in steps:
            steps[name] = build(name, input_of(name), labels_of(name), RATE)
        return turn(steps[name][kind])

    serve(measure)


def ratio_of(ratio: float) -> str:
    return "-" if math.isnan(ratio) else f"[red]{ratio:.2f}[/red]" if ratio > LOSES else f"{ratio:.2f}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--peer"]:
        peer()
    else:
        arguments = argparse.ArgumentParser()
        arguments.add_argument("given", nargs="*", help="a Python that has PyTorch, then the names of layers")
        arguments.add_argument("--rounds", type=int, default=5)
        parsed = arguments.parse_args()
        given: list[str] = parsed.given
        torch_python = given.pop(0) if given and given[0] not in SHAPES else None
        main(given or list(SHAPES), torch_python, parsed.rounds)
