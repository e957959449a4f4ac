"""Saving: how long `save` keeps the loop waiting beside a plain copy to the host, and how fast it writes.

A row a measurement: seconds, the median of several turns in turn.
"""

import shutil
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from mlax import train

TURNS = 7


def tree(megabytes):
    """Matrices of 4 MB and a vector with each, as a transformer has them."""
    kernel = jnp.ones((1024, 1024), jnp.float32)
    return {f"{number}": {"kernel": kernel + number, "bias": jnp.ones(1024)} for number in range(megabytes // 4)}


def timed(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main():
    state = jax.block_until_ready(tree(500))

    def fresh():
        """The same values in other arrays: JAX remembers what it has brought to the host."""
        return jax.block_until_ready(jax.tree.map(jnp.copy, state))

    folder = tempfile.mkdtemp(prefix="mlax-benchmark-")
    checkpoints = train.Checkpoints(folder, keep=1)
    copies, stalls, whole = [], [], []
    for turn in range(TURNS):
        one, other = fresh(), fresh()
        copies.append(timed(lambda one=one: [np.array(leaf) for leaf in jax.tree.leaves(one)]))
        stalls.append(timed(lambda turn=turn, other=other: checkpoints.save(turn, other)))
        whole.append(stalls[-1] + timed(checkpoints.wait))
    tiny = jax.tree.map(lambda leaf: leaf.ravel()[:1], state)
    calls = []
    for turn in range(TURNS):
        calls.append(timed(lambda turn=turn: checkpoints.save(TURNS + turn, tiny)))
        checkpoints.wait()
    checkpoints.save(2 * TURNS, state)
    checkpoints.wait()
    more = [stall - copy for stall, copy in zip(stalls, copies, strict=True)]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    data = np.ones(size, np.uint8)
    hashing = [timed(lambda: xxhash.xxh3_128_hexdigest(data)) for _ in range(TURNS)]
    restoring = [timed(lambda: jax.block_until_ready(checkpoints.restore(state).tree)) for _ in range(3)]
    shutil.rmtree(folder)
    for name, times in (
        ("copy of 500 MB to the host", copies),
        ("save() of 500 MB", stalls),
        ("save() less the copy in the same turn", more),
        ("save() of as many leaves of one number", calls),
        ("save() and wait(), all on the disk", whole),
        ("restore(), all verified", restoring),
        ("xxh3-128 of 500 MB", hashing),
    ):
        typical, best = statistics.median(times), min(times)
        rate = f"{size / typical / 1e9:6.2f} GB/s" if "number" not in name and "less" not in name else ""
        print(f"{name:40} {1e3 * typical:8.1f} ms   best {1e3 * best:8.1f} ms   {rate}")


if __name__ == "__main__":
    main()
