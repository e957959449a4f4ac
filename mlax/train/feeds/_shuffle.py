"""Shuffle the example ids of an epoch without storing a permutation."""

import functools
from collections.abc import Sequence

import numpy as np

_ROUNDS = 24  # of the Feistel network: four suffice for large ranges; with these even those of eight are uniform
MAX_SORTED = 1 << 16  # the largest range of which the whole permutation is made, in 5 ms and 1 MB
BLOCK = 1 << 12  # positions of a larger one that are permuted per call: many batches, to amortise NumPy's overhead


def epoch_ids(n: int, seed: int | None, epoch: int, start: int, stop: int, part: int = 0) -> np.ndarray:
    """The ids at positions `start` to `stop` of an epoch over range(n): in order if `seed` is None, else shuffled.

    A pure function. Different `part`s of an epoch are shuffled independently.
    """
    if seed is None:
        return np.arange(start, stop)
    if n <= MAX_SORTED:
        return _sorted_by_random_keys(n, seed, epoch, part)[start:stop].copy()
    blocks = range(start // BLOCK, max(start, stop - 1) // BLOCK + 1)
    ids = [_permute_block(n, seed, epoch, part, block) for block in blocks]
    first = blocks.start * BLOCK
    return np.concatenate(ids)[start - first : stop - first]


def pad_ids(ids: np.ndarray, batch: int) -> np.ndarray:
    """Ids, padded with -1 to length `batch`."""
    return np.concatenate([ids, np.full(batch - len(ids), -1, ids.dtype)])


def permute(positions: np.ndarray, n: int, seed: int, epoch: int, part: int = 0) -> np.ndarray:
    """Apply the permutation of range(n) for (seed, epoch, part) to `positions`.

    Up to `MAX_SORTED` the range is sorted by random keys, so that all permutations are equally likely. Above that,
    memory is proportional to `positions`, not to n: a Feistel network permutes the smallest range 2**bits that contains
    n. Each round XORs one half of the bits with a keyed hash of the other half, which is invertible. A result outside
    range(n) is permuted again until it is inside (cycle walking). https://doi.org/10.1007/3-540-45760-7_9
    """
    if n <= MAX_SORTED:
        return _sorted_by_random_keys(n, seed, epoch, part)[positions]
    return _permute_by_feistel(positions, n, seed, epoch, part)


@functools.lru_cache(maxsize=32)
def _sorted_by_random_keys(n: int, seed: int, epoch: int, part: int) -> np.ndarray:
    # The raw output of a bit generator, and a stable sort of it, are the same in every version of NumPy.
    keys = np.random.Philox(_seed_sequence(seed, epoch, part)).random_raw(n)
    return np.argsort(keys, kind="stable")


def _seed_sequence(seed: int, epoch: int, part: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(0, epoch, part))


def _permute_by_feistel(positions: np.ndarray, n: int, seed: int, epoch: int, part: int) -> np.ndarray:
    *keys, parity = _seed_sequence(seed, epoch, part).generate_state(_ROUNDS + 1, np.uint64)
    bits = max(1, (n - 1).bit_length())

    def permute_once(x: np.ndarray) -> np.ndarray:
        ids = _feistel(x, bits, keys)
        # All rounds are even permutations. Exchanging 0 and 1, or not, makes odd ones as likely.
        return np.where(ids < 2, ids ^ (parity & np.uint64(1)), ids)

    ids = permute_once(positions.astype(np.uint64))
    outside = np.flatnonzero(ids >= n)
    while outside.size:
        ids[outside] = permute_once(ids[outside])
        outside = outside[ids[outside] >= n]
    return ids.astype(np.int64)


@functools.lru_cache(maxsize=32)
def _permute_block(n: int, seed: int, epoch: int, part: int, block: int) -> np.ndarray:
    positions = np.arange(block * BLOCK, min(n, (block + 1) * BLOCK))
    return _permute_by_feistel(positions, n, seed, epoch, part)


def _feistel(x: np.ndarray, bits: int, keys: Sequence[np.uint64]) -> np.ndarray:
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
