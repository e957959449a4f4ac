"""Claim: `import mlax` adds under 0.1 s to `import jax, jax.numpy`.

Each import runs in a new process, the libraries interleaved. What a library adds is timed inside its process, from the
end of `import jax, jax.numpy` to the end of its own import, which excludes the noise of JAX's import. CPU time is shown
too, since other processes on the same cores affect only wall time.

    python benchmarks/imports.py    # 2 minutes

Typical, on 2 quiet cores of a server, JAX 0.11.2: mlax adds 0.05 s, Flax NNX 0.42, Equinox 0.19, Haiku 0.22.
`mlax.nn` is imported lazily, on first use.
"""

import functools
import importlib
import sys
import time

from harness import interleave, median, print_table, report, run_isolated, seconds, verdict

ROUNDS = 11
LIMIT = 0.1
LIBRARIES = {"JAX alone": "jax", "mlax": "mlax", "Flax NNX": "flax.nnx", "Equinox": "equinox", "Haiku": "haiku"}


def main() -> None:
    measurements = {library: functools.partial(run_isolated, library) for library in LIBRARIES}
    interleave(measurements, rounds=1)  # warms the file cache
    results = interleave(measurements, rounds=ROUNDS)
    alone = median(results["JAX alone"], "total")
    rows = []
    for library, each in results.items():
        total, adds = median(each, "total"), median(each, "adds")
        claim = verdict(f"adds under {LIMIT} s", adds < LIMIT) if library == "mlax" else ""
        cpu = median(each, "cpu")
        rows.append((library, seconds(total), f"{total / alone:.2f}", seconds(adds), seconds(cpu), claim))
    header = ("library", "total", "total / JAX", "adds", "adds, CPU time", "claim")
    print_table(f"Imports in new processes: medians of {ROUNDS}", header, rows)


def measure(library: str) -> None:
    start = time.perf_counter()
    import jax
    import jax.numpy  # noqa: F401

    middle, cpu_start = time.perf_counter(), time.process_time()
    importlib.import_module(LIBRARIES[library])
    end = time.perf_counter()
    report(total=end - start, adds=end - middle, cpu=time.process_time() - cpu_start)


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
