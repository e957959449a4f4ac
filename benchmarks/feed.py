"""Claims: a Feed hardly ever makes a step of 10 ms wait, keeps pace with NumPy, and resumes immediately at any step.

Batches of 256 images of 32x32x3 bytes out of 20,000 in memory, shuffled, put on the default device:

- batches per second, without a consumer: a plain NumPy loop that shuffles an epoch, gathers and puts; train.Feed;
  and, if installed, Grain (reading with 16 threads, its default) and PyTorch's DataLoader (which leaves its batches on
  the host) with 0 and 2 workers. Both read one example at a time, since they are made for files;
- how long a step of 10 ms, which sleeps as if it waited for an accelerator, waits for its batch. The loop by hand,
  which loads between steps, waits for the whole loading time;
- the time to the first batch, at step 0 and at step 1,000,000, and of 10^9 examples.

    python benchmarks/feed.py    # half a minute

Typical, on 2 shared cores: 1,600 to 1,900 batches per second (by hand 1,300 to 2,900; PyTorch 880 and 510; Grain 60); a
step waits 0.1 ms (0.05 ms if the batches are preloaded, 0.7 ms by hand); first batches after 3 to 23 ms.
"""

import functools
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from harness import interleave, print_table, seconds, verdict

from mlax import train

N, BATCH, STEP = 20_000, 256, 0.010
ARRAYS = {"image": np.random.default_rng(0).integers(0, 255, (N, 32, 32, 3), np.uint8), "label": np.arange(N) % 10}

Loop = Callable[[], Iterator[Any]]


class Examples:
    """The same examples one at a time, as the peers read them."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: array[i] for name, array in ARRAYS.items()}


def preloaded() -> Iterator[Any]:
    """Preloaded batches: the minimum cost of `next`."""
    return itertools.cycle(itertools.islice(by_hand(), 20))


def by_hand() -> Iterator[Any]:
    generator = np.random.default_rng(0)
    while True:
        order = generator.permutation(N)
        for start in range(0, N - BATCH + 1, BATCH):
            ids = order[start : start + BATCH]
            yield jax.device_put({name: array[ids] for name, array in ARRAYS.items()})


def by_grain() -> Iterator[Any]:
    import grain  # pyright: ignore[reportMissingImports]

    data = grain.MapDataset.source(Examples()).shuffle(seed=0).repeat().batch(BATCH).to_iter_dataset()
    return map(jax.device_put, data)


def by_torch(workers: int) -> Iterator[Any]:
    from torch.utils.data import DataLoader  # pyright: ignore[reportMissingImports]

    examples: Any = Examples()
    loader = DataLoader(
        examples, BATCH, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=workers > 0
    )
    while True:
        yield from loader


def loops() -> dict[str, Loop]:
    by_name: dict[str, Loop] = {
        "NumPy by hand": by_hand,
        "train.Feed": lambda: train.Feed(ARRAYS, BATCH, seed=0).stream(),
        "train.Feed, 1 worker": lambda: train.Feed(ARRAYS, BATCH, seed=0, workers=1).stream(),
    }
    if importlib.util.find_spec("grain"):
        by_name["Grain"] = by_grain
    if importlib.util.find_spec("torch"):
        by_name |= {f"PyTorch, {workers} workers": functools.partial(by_torch, workers) for workers in (0, 2)}
    return by_name


def seconds_per_batch(loop: Loop, batches: int = 100) -> float:
    """Seconds per batch, if each is waited for and discarded."""
    iterator = loop()
    for _ in range(3):
        jax.block_until_ready(next(iterator))
    start = time.perf_counter()
    for _ in range(batches):
        jax.block_until_ready(next(iterator))
    return (time.perf_counter() - start) / batches


def waits(loop: Loop, steps: int = 200) -> list[float]:
    """The seconds that each step of 10 ms waits for its batch, sorted."""
    iterator = loop()
    jax.block_until_ready(next(iterator))
    times = []
    for _ in range(steps):
        time.sleep(STEP)
        start = time.perf_counter()
        batch = next(iterator)
        if not all(leaf.is_ready() for leaf in batch.values() if isinstance(leaf, jax.Array)):
            jax.block_until_ready(batch)
        times.append(time.perf_counter() - start)
        del batch  # freeing it takes longer than getting the next
    return sorted(times)


class Billion:
    """A source of 10^9 examples that costs nothing to read."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return {"id": ids}


def first_batch(source: Any, step: int) -> float:
    """Seconds to the first batch from `step`; with a new seed, so that nothing is cached."""
    seed = time.perf_counter_ns()
    start = time.perf_counter()
    with train.Feed(source, BATCH, seed=seed).stream(start=step) as stream:
        jax.block_until_ready(next(stream))
    return time.perf_counter() - start


def main() -> None:
    all_loops = loops()
    measurements = {name: functools.partial(seconds_per_batch, loop) for name, loop in all_loops.items()}
    fastest = {name: min(times) for name, times in interleave(measurements, rounds=5, seconds=20).items()}
    rows = []
    for name, one in fastest.items():
        ratio = one / fastest["NumPy by hand"]
        claim = verdict("at most 1.5 x by hand", ratio <= 1.5) if name == "train.Feed" else ""
        rows.append((name, f"{1 / one:,.0f}", seconds(one), f"{ratio:.2f}", claim))
    print_table(f"Batches of {BATCH}, best of 5 rounds", ("loop", "per second", "each", "/ by hand", "claim"), rows)

    rows = []
    floor = 0.0
    for name, loop in {"preloaded batches": preloaded, **all_loops}.items():
        waited = waits(loop)
        middle = statistics.median(waited)
        floor = floor or middle
        claim = verdict("at most 0.1 ms over preloaded", middle - floor <= 1e-4) if name == "train.Feed" else ""
        rows.append((name, seconds(middle), seconds(waited[-len(waited) // 100 - 1]), seconds(waited[-1]), claim))
    print_table("How long a step of 10 ms waits for its batch", ("loop", "median", "99%", "worst", "claim"), rows)

    starts = {"at step 0": (ARRAYS, 0), "at step 1,000,000": (ARRAYS, 10**6)}
    starts |= {"10^9 examples, step 0": (Billion(), 0), "10^9 examples, step 1,000,000": (Billion(), 10**6)}
    first_batch(ARRAYS, 0)
    times = interleave({name: functools.partial(first_batch, *start) for name, start in starts.items()}, rounds=11)
    medians = {name: statistics.median(each) for name, each in times.items()}
    rows = []
    for name, one in medians.items():
        claim = verdict("under 50 ms", one < 0.05)
        rows.append((name, seconds(one), claim))
    print_table("Time to the first batch", ("start", "median", "claim"), rows)


if __name__ == "__main__":
    main()
