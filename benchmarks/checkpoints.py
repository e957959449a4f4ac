"""Checkpoints: how long `save` blocks the loop compared with a plain copy to the host, and how fast it writes.

One row per measurement: the median of several interleaved repeats.
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

REPEATS = 7


def make_state(megabytes):
    """Matrices of 4 MB, each with a vector, as in a transformer."""
    kernel = jnp.ones((1024, 1024), jnp.float32)
    return {f"{number}": {"kernel": kernel + number, "bias": jnp.ones(1024)} for number in range(megabytes // 4)}


def time_call(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main():
    state = jax.block_until_ready(make_state(500))

    def copy_state():
        """The same values in new arrays: JAX caches host copies."""
        return jax.block_until_ready(jax.tree.map(jnp.copy, state))

    folder = tempfile.mkdtemp(prefix="mlax-benchmark-")
    checkpoints = train.Checkpoints(folder, keep=1)
    copies, saves, totals = [], [], []
    for repeat in range(REPEATS):
        one, other = copy_state(), copy_state()
        copies.append(time_call(lambda one=one: [np.array(leaf) for leaf in jax.tree.leaves(one)]))
        saves.append(time_call(lambda repeat=repeat, other=other: checkpoints.save(repeat, other)))
        totals.append(saves[-1] + time_call(checkpoints.wait))
    tiny = jax.tree.map(lambda leaf: leaf.ravel()[:1], state)
    small = []
    for repeat in range(REPEATS):
        small.append(time_call(lambda repeat=repeat: checkpoints.save(REPEATS + repeat, tiny)))
        checkpoints.wait()
    checkpoints.save(2 * REPEATS, state)
    checkpoints.wait()
    overhead = [save - copy for save, copy in zip(saves, copies, strict=True)]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    data = np.ones(size, np.uint8)
    hashing = [time_call(lambda: xxhash.xxh3_128_hexdigest(data)) for _ in range(REPEATS)]
    restoring = [time_call(lambda: jax.block_until_ready(checkpoints.restore(state).tree)) for _ in range(3)]
    shutil.rmtree(folder)
    for name, times in (
        ("copy 500 MB to the host", copies),
        ("save() of 500 MB", saves),
        ("save() minus the copy in the same repeat", overhead),
        ("save() of as many scalar leaves", small),
        ("save() and wait(), all on disk", totals),
        ("restore(), verified", restoring),
        ("xxh3-128 of 500 MB", hashing),
    ):
        typical, best = statistics.median(times), min(times)
        rate = f"{size / typical / 1e9:6.2f} GB/s" if "scalar" not in name and "minus" not in name else ""
        print(f"{name:40} {1e3 * typical:8.1f} ms   best {1e3 * best:8.1f} ms   {rate}")


if __name__ == "__main__":
    main()
