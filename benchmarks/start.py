"""Claim: with a filled compilation cache, the first training step of GPT-2 ends within 5 s of the start of its process.

    python benchmarks/start.py [--rounds N]    # 2 minutes on a GPU
    python benchmarks/start.py --depth 2 --width 64 --vocabulary 301 --batch 2 --length 32    # on a CPU

The first process fills an empty cache, and those after it find what it left: with the memory that JAX allocates by
default, with nearly all of a GPU, with little, and with none in advance. Listed are seconds since the process started,
and how long the step alone was traced, lowered, and read or compiled; the last of these is in a thread, while the model
is initialized. mlax's own bytecode is compiled before, as pip does.
"""

import argparse
import compileall
import functools
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from harness import FAILED, Result, interleave, median, print_table, report, run_isolated, seconds, verdict

LIMIT = 5.0  # seconds
ROOT = Path(__file__).parents[1]
PHASES = {  # of a process, in order
    "imported": "imports",
    "device": "array",
    "initialized": "state",
    "compiled": "compiled",
    "first": "first step",
}
EVENTS = {  # of JAX, about the step alone
    "jaxpr_trace_duration": "traced",
    "jaxpr_to_mlir_module_duration": "lowered",
    "backend_compile_duration": "read",
}
MEMORY: dict[str, Mapping[str, str]] = {
    "default": {},
    "90%": {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"},
    "20%": {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2"},
    "as needed": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
}


def main(arguments: list[str], rounds: int) -> None:
    for package in ("mlax", "benchmarks"):
        compileall.compile_dir(ROOT / package, quiet=2)
    with tempfile.TemporaryDirectory() as caches:
        empty = start(arguments, caches, {})
        starts = {name: functools.partial(start, arguments, caches, settings) for name, settings in MEMORY.items()}
        results = {"default, empty cache": [empty], **interleave(starts, rounds=rounds)}
    rows = []
    for name, found in results.items():
        times = {each: median(found, each) for each in (*PHASES, *EVENTS.values())}
        claim = verdict(f"under {LIMIT:g} s", times["first"] <= LIMIT) if name == "default" else ""
        rows.append((name, *map(seconds, times.values()), claim))
    header = ("memory", *PHASES.values(), "traced", "lowered", "read", "claim")
    print_table(f"Start of a process: medians of {rounds}", header, rows)
    sys.exit(bool(FAILED))


def start(arguments: list[str], caches: str, settings: Mapping[str, str]) -> Result:
    """The times of a new process, whose caches are in this folder."""
    environment = {"XDG_CACHE_HOME": caches, "CUDA_CACHE_PATH": caches, "PYTHONPATH": str(ROOT), **settings}
    with mock.patch.dict(os.environ, environment):
        return run_isolated("--child", repr(time.time()), *arguments)


def child(began: float, options: argparse.Namespace) -> None:
    """A program as a user writes it, which notes the time."""
    times: dict[str, float] = {}

    def note(phase: str) -> None:
        times[phase] = time.time() - began

    import jax
    import jax.numpy as jnp
    import numpy as np

    import mlax
    from mlax import dtypes, optim, train, zoo

    note("imported")
    jax.monitoring.register_event_duration_secs_listener(functools.partial(add_event, times))
    train.enable_compilation_cache()
    tokens = np.random.default_rng(0).integers(0, options.vocabulary, (options.batch, options.length + 1), np.int32)
    batch = {"x": jnp.asarray(tokens[:, :-1]), "y": jnp.asarray(tokens[:, 1:])}
    jax.block_until_ready(batch)
    note("device")
    model = zoo.GPT2(
        vocabulary=options.vocabulary,
        positions=options.length,
        width=options.width,
        depth=options.depth,
        heads=options.width // 64 or 1,
    )
    model = dtypes.mixed_bfloat16(mlax.override(model, mlax.Repeat, mode="unroll"))

    def objective(
        batch: Any, trainables: Any, non_trainables: Any, rng: Any = None, inference_mode: bool = False
    ) -> Any:
        inputs = batch["x"], None, batch["y"]
        return model.fwd(inputs, trainables, non_trainables, rng=rng, inference_mode=inference_mode)

    step = train.step(objective, optim.AdamW(3e-4))
    state = jax.block_until_ready(step.init_model(jax.random.key(0), model, batch["x"], batch))
    note("initialized")
    step.compile(state, batch)  # waits for it
    note("compiled")
    _, metrics = step(state, batch)
    float(metrics["loss"])
    note("first")
    report(**times)


def add_event(times: dict[str, float], event: str, duration: float, **details: Any) -> None:
    """Add the time of an event of JAX, if it is about the step."""
    name = EVENTS.get(event.rpartition("/")[2])
    if name is not None and "advance" in str(details.get("fun_name", "")):
        times[name] = times.get(name, 0.0) + duration


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"depth": 12, "width": 768, "vocabulary": 50_257, "batch": 32, "length": 1024}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child, options)
    else:
        main([f"--{name}={getattr(options, name)}" for name in sizes], options.rounds)
