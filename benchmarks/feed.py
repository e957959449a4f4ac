"""Claims: a Feed hardly ever makes a step of 10 ms wait, keeps pace with NumPy, and resumes at any step at once.

Batches of 256 images of 32x32x3 bytes out of 20,000 in memory, shuffled, put on the default device:

- batches a second, with nobody using them: a plain NumPy loop that shuffles an epoch, gathers and puts; train.Feed;
  and, where they are installed, Grain (read by 16 threads, its default) and PyTorch's DataLoader (which leaves its
  batches on the host) with 0 and 2 workers. Both read one example at a time, as they are made for files;
- what a step of 10 ms, which sleeps as one that waits for an accelerator does, waits for its batch. The loop by hand,
  which loads between steps, waits for all of the loading;
- the time from nothing to the first batch, at step 0 and at step 1,000,000, and of 10^9 examples.

    python benchmarks/feed.py    # half a minute

Typical, on 2 cores shared with others: 1,600 to 1,900 batches a second (by hand 1,300 to 2,900; PyTorch 880 and 510;
Grain 60); a step waits 0.1 ms (0.05 ms where batches lie ready, 0.7 ms by hand); first batches after 3 to 23 ms.
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
from side_by_side import in_turns, seconds, show, verdict

from mlax import train

N, BATCH, STEP = 20_000, 256, 0.010
ARRAYS = {"image": np.random.default_rng(0).integers(0, 255, (N, 32, 32, 3), np.uint8), "label": np.arange(N) % 10}

Loop = Callable[[], Iterator[Any]]


class Examples:
    """The same examples one at a time, as the peers want them."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: array[i] for name, array in ARRAYS.items()}


def ready() -> Iterator[Any]:
    """Batches that were all loaded before: what asking for one costs at least."""
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
    found: dict[str, Loop] = {
        "NumPy by hand": by_hand,
        "train.Feed": lambda: train.Feed(ARRAYS, BATCH, seed=0).stream(),
        "train.Feed, 1 worker": lambda: train.Feed(ARRAYS, BATCH, seed=0, workers=1).stream(),
    }
    if importlib.util.find_spec("grain"):
        found["Grain"] = by_grain
    if importlib.util.find_spec("torch"):
        found |= {f"PyTorch, {workers} workers": functools.partial(by_torch, workers) for workers in (0, 2)}
    return found


def a_batch(loop: Loop, batches: int = 100) -> float:
    """Seconds a batch, when each is waited for and dropped."""
    iterator = loop()
    for _ in range(3):
        jax.block_until_ready(next(iterator))
    begun = time.perf_counter()
    for _ in range(batches):
        jax.block_until_ready(next(iterator))
    return (time.perf_counter() - begun) / batches


def waits(loop: Loop, steps: int = 200) -> list[float]:
    """Seconds that each of some steps of 10 ms waits for its batch."""
    iterator = loop()
    jax.block_until_ready(next(iterator))
    taken = []
    for _ in range(steps):
        time.sleep(STEP)
        begun = time.perf_counter()
        batch = next(iterator)
        if not all(leaf.is_ready() for leaf in batch.values() if isinstance(leaf, jax.Array)):
            jax.block_until_ready(batch)
        taken.append(time.perf_counter() - begun)
        del batch  # to free it takes longer than to get the next
    return sorted(taken)


class Billion:
    """A source of 10^9 examples that costs nothing to read."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return {"id": ids}


def first_batch(source: Any, start: int) -> float:
    """Seconds from nothing to the first batch; a seed of its own, so that nothing is remembered."""
    seed = time.perf_counter_ns()
    begun = time.perf_counter()
    with train.Feed(source, BATCH, seed=seed).stream(start=start) as stream:
        jax.block_until_ready(next(stream))
    return time.perf_counter() - begun


def main() -> None:
    all_loops = loops()
    taken = in_turns({name: functools.partial(a_batch, loop) for name, loop in all_loops.items()}, rounds=5, seconds=20)
    fastest = {name: min(times) for name, times in taken.items()}
    rows = []
    for name, one in fastest.items():
        share = one / fastest["NumPy by hand"]
        claim = verdict("at most 1.5 x by hand", share <= 1.5) if name == "train.Feed" else ""
        rows.append((name, f"{1 / one:,.0f}", seconds(one), f"{share:.2f}", claim))
    show(f"Batches of {BATCH} in turns, the best of each", ("loop", "a second", "each", "/ by hand", "claim"), rows)

    rows = []
    floor = 0.0
    for name, loop in {"batches that lie ready": ready, **all_loops}.items():
        waited = waits(loop)
        middle = statistics.median(waited)
        floor = floor or middle
        claim = verdict("at most 0.1 ms over ready ones", middle - floor <= 1e-4) if name == "train.Feed" else ""
        rows.append((name, seconds(middle), seconds(waited[-len(waited) // 100 - 1]), seconds(waited[-1]), claim))
    show("What a step of 10 ms waits for its batch", ("loop", "median", "99%", "worst", "claim"), rows)

    starts = {"at step 0": (ARRAYS, 0), "at step 1,000,000": (ARRAYS, 10**6)}
    starts |= {"10^9 examples, step 0": (Billion(), 0), "10^9 examples, step 1,000,000": (Billion(), 10**6)}
    first_batch(ARRAYS, 0)
    found = in_turns({name: functools.partial(first_batch, *start) for name, start in starts.items()}, rounds=11)
    medians = {name: statistics.median(times) for name, times in found.items()}
    rows = []
    for name, one in medians.items():
        claim = verdict("under 50 ms", one < 0.05)
        rows.append((name, seconds(one), claim))
    show("From nothing to the first batch", ("from", "median", "claim"), rows)


if __name__ == "__main__":
    main()
