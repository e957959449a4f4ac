"""Shuffling: a permutation for every n, statistically random, and the same in every version."""

import inspect
import itertools
import math
from collections import Counter

import numpy as np
import pytest

from mlax.train.feeds import BLOCK, epoch_ids, permute


@pytest.fixture(params=["sorted", "feistel"])
def construction(request, monkeypatch):
    """How the permutation is made: small ranges as small ones are, and then as large ones are."""
    if request.param == "feistel":
        monkeypatch.setattr(inspect.getmodule(permute), "MAX_SORTED", 0)
    return request.param


def test_it_is_a_permutation_of_every_small_n(construction):
    for n in range(1, 301):
        assert sorted(permute(np.arange(n), n, seed=n, epoch=3)) == list(range(n))


@pytest.mark.parametrize("n", [2**16 - 1, 2**16, 2**16 + 1, 100_003])
def test_it_is_a_permutation_of_a_large_n(n):
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed=0, epoch=0)), np.arange(n))


@pytest.mark.parametrize("n", [10**9, 2**31 + 1, 10**12])
def test_a_billion_examples_cost_only_the_requested_positions(n):
    ids = permute(np.arange(n - 5_000, n), n, seed=0, epoch=0)
    assert len(set(ids.tolist())) == 5_000 and ids.min() >= 0 and ids.max() < n
    assert abs(ids.mean() / n - 0.5) < 0.02


def test_slices_of_an_epoch_come_from_one_permutation(construction):
    n = 3 * BLOCK + 17
    whole = permute(np.arange(n), n, seed=5, epoch=2)
    for start, stop in ((0, 1), (BLOCK - 3, BLOCK + 3), (0, n), (2 * BLOCK, n), (n - 1, n), (7, 7)):
        assert np.array_equal(epoch_ids(n, 5, 2, start, stop), whole[start:stop])
    assert np.array_equal(epoch_ids(n, None, 2, 5, 9), [5, 6, 7, 8])


@pytest.mark.parametrize("n", [3, 5, 11, 16])
def test_every_id_is_equally_likely_at_every_position(n, construction):
    epochs = 50 * n
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), permute(np.arange(n), n, seed=1, epoch=epoch)] += 1
    expected = epochs / n
    freedom = (n - 1) ** 2
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def chi_square_of_permutations(n, draws):
    """The chi-square statistic of all permutations of n, in standard deviations from its mean."""
    counts = Counter(permute(np.arange(n), n, seed=0, epoch=epoch).tobytes() for epoch in range(draws))
    kinds = math.factorial(n)
    expected = draws / kinds
    missing = (kinds - len(counts)) * expected
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values()) + missing
    return (chi_square - (kinds - 1)) / math.sqrt(2 * (kinds - 1))


def test_every_permutation_of_seven_is_equally_likely():
    assert abs(chi_square_of_permutations(7, 60_000)) < 4


def test_every_permutation_of_four_is_equally_likely(construction):
    assert abs(chi_square_of_permutations(4, 2_400)) < 4


def test_odd_permutations_are_as_likely_as_even_ones(construction):
    """Also of a power of two, where no id is permuted twice."""
    matrices = np.eye(8)[[permute(np.arange(8), 8, seed=0, epoch=epoch) for epoch in range(400)]]
    assert abs(np.linalg.det(matrices).sum()) < 4 * np.sqrt(400)


def test_neighbours_are_scattered_and_few_ids_stay_in_place(construction):
    n = 20_000
    ids = permute(np.arange(n), n, seed=0, epoch=0)
    assert np.sum(ids == np.arange(n)) < 10
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.03
    assert np.sum(np.abs(np.diff(ids)) == 1) < 15
    parts = np.histogram2d(np.arange(n), ids, bins=20)[0]
    assert abs(((parts - 50) ** 2 / 50).sum() - 361) < 5 * np.sqrt(2 * 361)


def test_seeds_epochs_and_parts_differ():
    orders = [permute(np.arange(50), 50, *key) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**70, 0, 0))]
    for a, b in itertools.combinations(orders, 2):
        assert not np.array_equal(a, b)


def test_the_order_never_changes_between_versions():
    assert permute(np.arange(10), 10, seed=0, epoch=0).tolist() == [6, 1, 4, 8, 2, 5, 9, 7, 3, 0]
    assert permute(np.arange(3), 10**9, seed=7, epoch=2).tolist() == [662984029, 884536533, 647045966]
