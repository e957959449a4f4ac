"""One library doing one work, in a process of its own: build, compile, wait for the turn, measure.

    python -m benchmarks.suite.entry WORK ENTRY [--tiny]

It prints three lines of JSON: after the first call, when it has compiled and warmed up, and with what it measured. It
measures when it reads a line, so that nothing else uses the device meanwhile.
"""

import argparse
import contextlib
import importlib
import io
import json
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from benchmarks.suite.works import MODULES, TORCH, WORKS, Entry, Work, shrink

WARM_UP, REPETITIONS = 3, 5


def main(name: str, entry_name: str, tiny: bool) -> None:
    work = next(work for work in WORKS if work.name == name)
    entry = next(entry for entry in work.entries if entry.name == entry_name)
    if tiny:
        work = shrink(work)
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # libraries print, too
        run(work, entry, "float32" if tiny else "bfloat16", out)


def run(work: Work, entry: Entry, dtype: str, out: Any) -> None:
    library = importlib.import_module(f"benchmarks.suite.{MODULES[entry.library]}")
    call = getattr(library, work.program)(work.size, dtype=dtype, **entry.options)
    values = [to_list(library.wait(call()))]
    say(out, state="first")
    values += [to_list(library.wait(call())) for _ in range(WARM_UP - 1 if not work.alone else 0)]
    say(out, state="ready")
    if not sys.stdin.readline():  # whoever asked has died
        return
    times = [] if work.alone else [time_calls(library, call, work.calls) for _ in range(REPETITIONS)]
    say(
        out,
        state="done",
        values=values,
        times=times,
        memory=library.peak_memory(),
        device=device_name(entry.library),
        versions=versions(entry.library),
    )


def time_calls(library: Any, call: Any, number: int) -> float:
    """The seconds of a call, over `number` of them."""
    start = time.perf_counter()
    for _ in range(number):
        result = call()
    library.wait(result)
    return (time.perf_counter() - start) / number


def to_list(value: Any) -> Any:
    """The loss of a call or of its last step; or its tokens."""
    value = np.asarray(value.cpu() if hasattr(value, "cpu") else value)
    return value.tolist() if value.ndim == 2 else float(value.reshape(-1)[-1])


def say(out: io.TextIOBase, **values: Any) -> None:
    print(json.dumps(values), file=out, flush=True)


def versions(library: str) -> dict[str, str]:
    """Of the packages that decide the speed of a library."""
    names = {
        "mlax": ("mlax", "jax", "jaxlib"),
        "plain JAX": ("jax", "jaxlib", "optax"),
        "Flax NNX": ("flax", "jax", "jaxlib", "optax"),
        "Equinox": ("equinox", "jax", "jaxlib", "optax"),
        "PyTorch": ("torch", "torchvision", "transformers"),
    }[library]
    return {name: found for name in names if (found := installed(name))}


def installed(name: str) -> str | None:
    if name == "mlax":
        import mlax

        return mlax.__version__
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def device_name(library: str) -> str:
    if library == TORCH:
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    import jax

    return jax.devices()[0].device_kind


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("work")
    parser.add_argument("entry")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    main(arguments.work, arguments.entry, arguments.tiny)
