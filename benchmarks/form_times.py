"""Claim: a training step without one of the kernels in Pallas is not faster than with all of them.

    python -m benchmarks.form_times                                      # 2 minutes on an H200
    python -m benchmarks.form_times --work vit --mode scan --only "kernels of MLPs"
    python -m benchmarks.form_times --profile runs/profiles              # the time of each kernel as well, JSON
    python -m benchmarks.form_times --tiny                               # on a CPU: that it runs; no kernels there

Steps of GPT-2 124M or ViT-B/16 of the sizes of `python -m benchmarks gpu`, with `train.step`. They are compiled one at
a time, since XLA times kernels to choose among them, and measured interleaved, so that all have the same clock: in a
long run a GPU is at its power limit. A time is the median of the rounds, ten steps each.
"""

import argparse
import collections
import glob
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.forms import FORMS, Form, apply_form, use
from benchmarks.harness import FAILED, interleave, print_table, verdict
from benchmarks.suite import mlax_programs as programs
from benchmarks.suite.inputs import make_batch, make_weights
from benchmarks.suite.works import GPT2, TINY, ViT
from mlax import train, zoo

ALL = FORMS["all"]
WITHOUT = {
    "kernels of MLPs": replace(ALL, joins_mlp=False),
    "kernels of MLPs and of GELU": replace(ALL, joins_mlp=False, kernels=("norm", "loss")),
    "kernels of projections": replace(ALL, joins_projections=False),
    "kernels of norms": replace(ALL, kernels=("gelu", "loss"), folds_biases=False),  # which are folded for their sake
    "kernels of the loss": replace(ALL, kernels=("norm", "gelu")),
}
SIZES = {"gpt2": GPT2, "vit": ViT}
STEPS, LIMIT = 10, 1.005  # in a round, and what a form may be slower by, since a tie is within the noise


class Program:
    """A training step in one form, with its state and a batch."""

    def __init__(self, work: str, form: Form, size: Any, variables: Any):
        model = make_model(work, size)
        objective = programs.language_objective if work == "gpt2" else _image_objective
        self.step = train.step(objective(apply_form(model, form)), programs.ADAMW)
        x, y = make_batch(size)
        self.batch = {"x": jnp.asarray(x), "y": jnp.asarray(y)}
        self.state = self.step.init(jax.random.key(1), *jax.tree.map(jnp.copy, variables))  # it is donated
        with use(form, size.width):
            self.step.aot.compile(self.state, self.batch)

    def measure(self) -> float:
        """Milliseconds of a step."""
        start = time.perf_counter()
        for _ in range(STEPS):
            self.state, _ = self.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        return (time.perf_counter() - start) / STEPS * 1e3


def _image_objective(model: Any) -> Any:
    return programs.objective_of(model, programs.cross_entropy)


def make_model(work: str, size: Any) -> Any:
    return programs.gpt2_model(size, "float32", "unroll") if work == "gpt2" else programs.vit_model(size)


def main(options: argparse.Namespace) -> None:
    kind = SIZES[options.work]
    size = kind(**TINY[kind]) if options.tiny else kind()
    variables = zoo.load_weights(make_model(options.work, size), make_weights(size))
    forms = {"all": ALL, **{f"without {name}": WITHOUT[name] for name in options.only or WITHOUT}}
    found = {
        name: Program(options.work, replace(form, mode=options.mode), size, variables) for name, form in forms.items()
    }
    for program in found.values():
        program.measure()
    measured = interleave({name: program.measure for name, program in found.items()}, rounds=options.rounds)
    times = {name: statistics.median(each) for name, each in measured.items()}
    rows = []
    for name, each in times.items():
        ratio = times["all"] / each
        words = f"all: at most {LIMIT} of it ({ratio:.3f})"
        claim = "" if name == "all" or options.tiny else verdict(words, ratio <= LIMIT)
        rows.append((name, f"{each:.2f} ms", f"{min(measured[name]):.2f} ms", claim))
    print_table(f"{options.work}, {options.mode}, on {jax.devices()[0]}", ("", "median", "best", ""), rows)
    if options.profile:
        options.profile.mkdir(parents=True, exist_ok=True)
        for name, program in found.items():
            write_profile(program, options.profile / f"{options.work}-{options.mode}-{name.replace(' ', '-')}.json")
    sys.exit(bool(FAILED))


def write_profile(program: Program, path: Path) -> None:
    """Write how often each kernel runs in a step, and its milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            program.measure()
        kernels: dict[str, list[float]] = collections.defaultdict(list)
        for trace in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
            for plane in jax.profiler.ProfileData.from_file(trace).planes:
                for line in plane.lines if "/device:" in plane.name else ():
                    for event in line.events if line.name.startswith("Stream") else ():
                        kernels[event.name].append(event.duration_ns / 1e6)
    rows = [{"kernel": name, "runs": len(each) / STEPS, "ms": sum(each) / STEPS} for name, each in kernels.items()]
    path.write_text(json.dumps(sorted(rows, key=lambda row: -row["ms"]), indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=SIZES, default="gpt2")
    parser.add_argument("--mode", choices=("unroll", "scan"), default="unroll", help="of Repeat")
    parser.add_argument("--only", nargs="+", choices=WITHOUT, metavar="NAME", help=f"among {', '.join(WITHOUT)}")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--profile", type=Path, metavar="FOLDER")
    parser.add_argument("--tiny", action="store_true")
    main(parser.parse_args())
