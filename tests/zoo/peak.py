"""The peak memory of loading a model, in this process: `python -m tests.zoo.peak FOLDER DEPTH`. Prints JSON."""

import gc
import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from mlax import place, zoo

RULES = [("**/kernel", P(None, "d")), ("**/table", P("d")), ("**", P())]


def memory(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def peak_of(folder: Path, plan: place.Plan | None) -> int:
    """The most memory that the process has while it loads."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    jax.block_until_ready(zoo.load(folder, plan=plan))
    peak = memory("VmHWM")
    gc.collect()  # frees the arrays
    return peak


def main(folder: Path, depth: int) -> None:
    for name, model in {
        "small": zoo.GPT2(vocabulary=64, positions=16, width=16, depth=2, heads=2),
        "model": zoo.GPT2(vocabulary=4096, positions=64, width=768, depth=depth, heads=12),
    }.items():
        shapes, _ = jax.eval_shape(model.init, jax.random.key(0), model.example_input())
        zoo.save(folder / name, model, jax.tree.map(lambda leaf: np.full(leaf.shape, 0.5, leaf.dtype), shapes))
    plans = None, place.Plan(mesh={"d": 8}, variables=RULES)  # in this order, since malloc keeps the shards' memory
    for plan in plans:  # what is allocated once
        zoo.load(folder / "small", plan=plan)
    leaves = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)]
    before = memory("VmRSS")
    peaks = [peak_of(folder / "model", plan) - before for plan in plans]
    print(json.dumps({"model": sum(leaves), "leaf": max(leaves), "none": peaks[0], "plan": peaks[1]}))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(Path(sys.argv[1]), int(sys.argv[2]))
