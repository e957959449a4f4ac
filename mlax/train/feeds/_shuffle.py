"""Shuffle the example ids of an epoch without storing a permutation."""

import functools

import numpy as np

_ROUNDS = 16  # of the Feistel network: four suffice for large ranges, but a range of five needs more
BLOCK = 1 << 12  # positions shuffled per call: many batches, to amortise NumPy's overhead


def epoch_ids(n: int, seed: int | None, epoch: int, start: int, stop: int, part: int = 0) -> np.ndarray:
    """The ids at positions `start` to `stop` of an epoch over range(n): in order if `seed` is None, else shuffled.

    A pure function. Different `part`s of an epoch are shuffled independently.
    """
    if seed is None:
        return np.arange(start, stop)
    blocks = range(start // BLOCK, max(start, stop - 1) // BLOCK + 1)
    ids = [_permute_block(n, seed, epoch, part, block) for block in blocks]
    first = blocks.start * BLOCK
    return np.concatenate(ids)[start - first : stop - first]


def pad_ids(ids: np.ndarray, batch: int) -> np.ndarray:
    """Ids, padded with -1 to length `batch`."""
    return np.concatenate([ids, np.full(batch - len(ids), -1, ids.dtype)])


def permute(positions: np.ndarray, n: int, seed: int, epoch: int, part: int = 0) -> np.ndarray:
    """Apply the permutation of range(n) for (seed, epoch, part) to `positions`.

    A Feistel network permutes the smallest range 2**bits that contains n: each round XORs one half of the bits with a
    keyed hash of the other half, which is invertible. A result outside range(n) is permuted again until it is inside
    (cycle walking). Memory is proportional to `positions`, not to n. https://doi.org/10.1007/3-540-45760-7_9
    """
    keys = np.random.SeedSequence(seed, spawn_key=(0, epoch, part)).generate_state(_ROUNDS, np.uint64)
    bits = max(1, (n - 1).bit_length())
    ids = _feistel(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(ids >= n)
    while outside.size:
        ids[outside] = _feistel(ids[outside], bits, keys)
        outside = outside[ids[outside] >= n]
    return ids.astype(np.int64)


@functools.lru_cache(maxsize=32)
def _permute_block(n: int, seed: int, epoch: int, part: int, block: int) -> np.ndarray:
    positions = np.arange(block * BLOCK, min(n, (block + 1) * BLOCK))
    return permute(positions, n, seed, epoch, part)


def _feistel(x: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    low_bits = np.uint64((bits + 1) // 2)
    low_mask = np.uint64((1 << int(low_bits)) - 1)
    high_mask = np.uint64((1 << bits // 2) - 1)
    high, low = x >> low_bits, x & low_mask
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        high ^= _hash(low ^ even) & high_mask
        low ^= _hash(high ^ odd) & low_mask
    return high << low_bits | low


def _hash(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: each bit of x flips each bit of the result with probability one half."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
