"""Claim: `import mlax` adds under 0.1 s to `import jax, jax.numpy`.

Each import runs in a fresh process, the libraries taking turns; `adds` is timed inside the process, from the end
of `import jax, jax.numpy` to the end of the library's own import, so that the noise of JAX's import is not in it.

    python benchmarks/imports.py    # 2 minutes

Typical, on 2 shared cores: ...
"""

import importlib
import sys
import time

from side_by_side import answer, fresh, in_turns, median, seconds, show, verdict

ROUNDS = 11
LIBRARIES = {"JAX alone": "jax.numpy", "mlax": "mlax", "Flax NNX": "flax.nnx", "Equinox": "equinox", "Haiku": "haiku"}
LIMIT = 0.1


def main() -> None:
    in_turns({name: lambda name=name: fresh(name) for name in LIBRARIES}, rounds=1)  # files into memory
    results = in_turns({name: lambda name=name: fresh(name) for name in LIBRARIES}, rounds=ROUNDS)
    rows = []
    for name, answers in results.items():
        adds = median(answers, "adds")
        rows.append(
            (
                name,
                seconds(median(answers, "total")),
                seconds(adds),
                seconds(min(result["adds"] for result in answers)),
                f"{median(answers, 'total') / median(results['JAX alone'], 'total'):.2f}",
                verdict("adds under 0.1 s", adds < LIMIT) if name == "mlax" else "",
            )
        )
    show(f"Imports, medians of {ROUNDS}", ("import", "total", "adds", "adds, best", "total / JAX", "claim"), rows)


def measure(name: str) -> None:
    start = time.perf_counter()
    import jax
    import jax.numpy  # noqa: F401

    middle = time.perf_counter()
    importlib.import_module(LIBRARIES[name])
    end = time.perf_counter()
    answer(total=end - start, adds=end - middle)


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
