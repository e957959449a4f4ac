"""Claim: `import mlax` adds under 0.1 s to `import jax, jax.numpy`.

Each import runs in a fresh process, the libraries taking turns. What a library adds is timed inside its process,
from the end of `import jax, jax.numpy` to the end of its own import, so that the noise of JAX's import is not in it.
The processor's time stands beside it, since other processes on the same cores stretch only the former.

    python benchmarks/imports.py    # 2 minutes

Typical, on 2 quiet cores of a server, JAX 0.11.2: mlax adds 0.05 s, Flax NNX 0.42, Equinox 0.19, Haiku 0.22. The room
`mlax.nn` is loaded when it is first used.
"""

import functools
import importlib
import sys
import time

from side_by_side import answer, fresh, in_turns, median, seconds, show, verdict

ROUNDS = 11
LIMIT = 0.1
LIBRARIES = {"JAX alone": "jax", "mlax": "mlax", "Flax NNX": "flax.nnx", "Equinox": "equinox", "Haiku": "haiku"}


def main() -> None:
    measurements = {library: functools.partial(fresh, library) for library in LIBRARIES}
    in_turns(measurements, rounds=1)  # brings the files into memory
    results = in_turns(measurements, rounds=ROUNDS)
    alone = median(results["JAX alone"], "total")
    rows = []
    for library, answers in results.items():
        total, adds = median(answers, "total"), median(answers, "adds")
        claim = verdict(f"adds under {LIMIT} s", adds < LIMIT) if library == "mlax" else ""
        processor = median(answers, "processor")
        rows.append((library, seconds(total), f"{total / alone:.2f}", seconds(adds), seconds(processor), claim))
    header = ("library", "total", "total / JAX", "adds", "adds, processor", "claim")
    show(f"Imports in fresh processes: medians of {ROUNDS}", header, rows)


def measure(library: str) -> None:
    start = time.perf_counter()
    import jax
    import jax.numpy  # noqa: F401

    middle, worked = time.perf_counter(), time.process_time()
    importlib.import_module(LIBRARIES[library])
    end = time.perf_counter()
    answer(total=end - start, adds=end - middle, processor=time.process_time() - worked)


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
