"""Claims: on a CPU, no layer is more than 5% slower than Flax NNX's or Equinox's, forward and in training; a GELU MLP
block and the training step of a small CNN are no slower than PyTorch's.

Lists where mlax is slower. All compute the same thing in float32, except for Flax's norms, whose variance is by default
the less accurate mean(x^2) - mean(x)^2. Libraries whose compiled programs are the same, but for names, are equally
fast, whatever the noise of the machine: "=". Where mlax seems slower than Flax or Equinox, the layer
is measured again, and three times as many new rounds decide, alone.

    python benchmarks/layers.py [python-with-torch] [names...] [--rounds N]    # 10 minutes; names as "Conv"

A training step computes the output, and then the gradients of weights and input for a given cotangent; that of the CNN
has a loss and SGD instead. A conditional on the output keeps XLA from running the backward pass beside the forward
pass, which it cannot in training, where the cotangent is computed from the output. All run in training mode; weights
and inputs are arguments, so that nothing is constant-folded, and all results are materialized. The process keeps freed
memory (`train.keep_freed_memory`), from which all libraries on JAX gain. Each library is used as documented
(layer_peers), PyTorch eagerly, since its compiler is a separate library, and with images in its channels-last format.
PyTorch runs in its own process, which idles while JAX computes, and vice versa. On a GPU both use it.
"""

import argparse
import importlib
import itertools
import math
import shutil
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from harness import (
    FAILED,
    Process,
    interleave,
    print_table,
    program_hash,
    seconds,
    serve,
    time_steps,
    verdict,
    write_rows,
)

SHAPES = {  # of the inputs: channels last, and time first for LSTM and GRU
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
JAX_PEERS = ("Flax", "Equinox")
TOLERANCE = 1.05
RATE = 1e-3
LEAST = 0.03  # seconds of each measurement
KINDS = {"forward": "Forward", "training": "Training step"}
Run = tuple[str, str]  # a kind of step and a library


def main(names: list[str], torch_python: str | None, rounds: int, rows_path: str | None = None) -> None:
    from rich import print

    from mlax import train

    train.keep_freed_memory()
    torch = Process(torch_python, "--peer") if torch_python else None
    measured = {name: measure_layer(name, torch, rounds) for name in names}
    if torch:
        torch.close()
    slower, ratios = [], {}
    for kind, title in KINDS.items():
        rows = []
        for name in names:
            times, programs = (
                {library: each for (found_kind, library), each in found.items() if found_kind == kind}
                for found in measured[name]
            )
            write_rows(rows_path, "layers", f"{name}, {title.lower()}", times, torch_python, programs)
            for peer in PEERS:
                ratio = ratios[kind, name, peer] = ratio_to(peer, kind, *measured[name])
                if ratio > TOLERANCE:
                    slower.append(f"{name} ({kind}) than {peer}, {ratio:.2f}")
            shape = " x ".join(map(str, SHAPES[name]))
            rows.append(
                (name, seconds(times["mlax"]), *(format_ratio(ratios[kind, name, peer]) for peer in PEERS), shape)
            )
        print_table(
            f"{title}: time of mlax, and relative to its peers (below 1: mlax is faster), {rounds} rounds or more",
            ("layer", "mlax", *(f"/ {peer}" for peer in PEERS), "input"),
            rows,
        )
    print("mlax is slower:", *(slower or ["nowhere"]), sep="\n  ")
    compared = {which: ratio for which, ratio in ratios.items() if which[2] != "PyTorch" and not math.isnan(ratio)}
    if compared:
        (kind, name, peer), ratio = max(compared.items(), key=lambda item: item[1])
        worst = f"at worst {ratio:.2f}, {name} ({kind}) and {peer}"
        print(verdict(f"no layer is slower than a JAX peer's by more than 5%: {worst}", ratio <= TOLERANCE))
    for name, title in CLAIMS.items():
        ratio = ratios.get(("training", name, "PyTorch"), math.nan)
        if not math.isnan(ratio):
            print(verdict(f"{title} is no slower than PyTorch's ({ratio:.2f})", ratio <= TOLERANCE))


def measure_layer(name: str, torch: Process | None, rounds: int) -> tuple[dict[Run, float], dict[Run, str | None]]:
    """The median seconds of each kind and library, interleaved, and the hashes of the programs."""
    measurements: dict[Run, Callable[[], list[float]]] = {}
    programs: dict[Run, str | None] = {}
    for library, steps in {"mlax": jax_steps("mlax", name), **jax_peers(name)}.items():
        for kind, (step, program) in steps.items():
            measurements[kind, library], programs[kind, library] = partial(time_steps, step, least=LEAST), program
    if torch:
        measurements |= {(kind, "PyTorch"): partial(torch.ask, f"{kind} {name}") for kind in KINDS}
    interleave(measurements, rounds=1)  # compiles
    times = median_times(measurements, rounds)
    ratios = {each: ratio_to(*each, times, programs) for each in itertools.product(JAX_PEERS, KINDS)}
    if slower := [f"{peer} ({kind}), {ratio:.2f}" for (peer, kind), ratio in ratios.items() if ratio > TOLERANCE]:
        print(f"{name} is measured again, since it seems slower than that of {', '.join(slower)}", flush=True)
        times = median_times(measurements, 3 * rounds)
    return times, programs


def median_times(measurements: dict[Run, Callable[[], list[float]]], rounds: int) -> dict[Run, float]:
    """The median seconds of each, over interleaved rounds."""
    times = interleave(measurements, rounds=rounds)
    return {run: statistics.median(map(statistics.median, repeats)) for run, repeats in times.items()}


def ratio_to(peer: str, kind: str, times: dict[Run, float], programs: dict[Run, str | None]) -> float:
    """The time of mlax relative to a peer's: 1 if their programs are the same, NaN if the peer has no such layer."""
    program = programs[kind, "mlax"]
    if program is not None and programs.get((kind, peer)) == program:
        return 1.0
    return times[kind, "mlax"] / times.get((kind, peer), math.nan)


def jax_peers(name: str) -> dict[str, Any]:
    """The steps of each installed JAX peer that has such a layer."""
    steps = {}
    for peer in JAX_PEERS:
        try:
            steps[peer] = jax_steps(PEERS[peer], name)
        except (ModuleNotFoundError, KeyError):
            continue
    return steps


def jax_steps(library: str, name: str) -> dict[str, tuple[Callable[[], Any], str | None]]:
    """Each kind of step, and the hash of its program."""
    import jax
    import jax.numpy as jnp

    call, weights, rest, x = importlib.import_module(f"layer_peers.{library}_layers").build(name, make_input(name))
    x = jnp.asarray(x)
    current = {"weights": weights}

    @jax.jit
    def gradients(weights, rest, x, cotangent, is_given):
        if jnp.issubdtype(x.dtype, jnp.integer):
            y, vjp, rest = jax.vjp(lambda weights: call(weights, rest, x), weights, has_aux=True)
        else:
            y, vjp, rest = jax.vjp(lambda weights, x: call(weights, rest, x), weights, x, has_aux=True)
        number = jax.lax.cond(is_given, lambda y: jnp.zeros((), y.dtype), jnp.sum, y)
        return y, rest, vjp(cotangent + number)

    @partial(jax.jit, donate_argnums=0)
    def update(weights, rest, x, labels):
        def loss(weights):
            logits, new = call(weights, rest, x)
            gold = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
            return jnp.mean(jax.nn.logsumexp(logits, 1) - gold), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(weights)
        return jax.tree.map(lambda weight, grad: weight - RATE * grad, weights, grads), new, value

    def train():
        current["weights"], _, value = update(current["weights"], rest, x, labels)
        return jax.block_until_ready((current["weights"], value))

    forward = jax.jit(call)
    labels = make_labels(name)
    y = jax.eval_shape(call, weights, rest, x)[0]
    given = (jnp.ones(y.shape, y.dtype), jnp.asarray(True))  # the cotangent, and that it is the whole of it

    def run(function: Any, *arguments: Any) -> tuple[Callable[[], Any], str | None]:
        program = program_hash(function.lower(weights, *arguments).compile())
        return lambda: jax.block_until_ready(function(current["weights"], *arguments)), program

    if labels is None:
        training = run(gradients, rest, x, *given)
    else:
        training = train, program_hash(update.lower(weights, rest, x, labels).compile())
    return {"forward": run(forward, rest, x), "training": training}


def make_input(name: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    if name == "Embed":
        return rng.integers(0, 8192, SHAPES[name], np.int32)
    return rng.standard_normal(SHAPES[name], np.float32)


def make_labels(name: str) -> np.ndarray | None:
    return np.random.default_rng(1).integers(0, 10, SHAPES[name][0], np.int32) if name == "CNN" else None


def peer() -> None:
    """Answer each line, a kind and the name of a layer, with the times of PyTorch's steps."""
    from layer_peers.torch_layers import LAYERS, build

    steps: dict[str, Any] = {}

    def measure(line: str) -> list[float]:
        kind, name = line.split(" ", 1)
        if name not in LAYERS:
            return [math.nan]
        if name not in steps:
            steps[name] = build(name, make_input(name), make_labels(name), RATE)
        return time_steps(steps[name][kind], least=LEAST)

    serve(measure)


def format_ratio(ratio: float) -> str:
    if ratio == 1:
        return "="
    return "-" if math.isnan(ratio) else f"[red]{ratio:.2f}[/red]" if ratio > TOLERANCE else f"{ratio:.2f}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--peer"]:
        peer()
    else:
        arguments = argparse.ArgumentParser()
        arguments.add_argument("names", nargs="*", help="optionally a Python that has PyTorch, then names of layers")
        arguments.add_argument("--rounds", type=int, default=5)
        arguments.add_argument("--rows", help="a file that rows are appended to")
        parsed = arguments.parse_args()
        names: list[str] = parsed.names
        torch_python = names.pop(0) if names and shutil.which(names[0]) else None
        if unknown := set(names) - set(SHAPES):
            arguments.error(f"there is no layer or Python {'; '.join(sorted(unknown))}. Layers: {'; '.join(SHAPES)}")
        main(names or list(SHAPES), torch_python, parsed.rounds, parsed.rows)
        sys.exit(1 if FAILED else 0)
