"""The weights to evaluate with: each leaf as the optimizer that trains it shows it, whatever is around."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import optim
from tests.asserts import assert_close
from tests.catalogue.optimizers import tree
from tests.optim.test_wrappers import steps

AVERAGE = optim.Average(optim.Adam(1e-2), 0.9)
SLOW = optim.Lookahead(optim.SGD(0.1), 2)
FREE = optim.ScheduleFree(1e-2)
PLAIN = optim.SGD(0.1)
LEAVES = ("dense/bias", "dense/kernel", "stack/kernel", "temperature")


def by_path(whole):
    return dict(zip(LEAVES, jax.tree.leaves(whole), strict=True))


def evaluated(optimizer, **given):
    trainables, state = steps(optimizer, **given)
    shown = optimizer.eval_trainables(state, trainables)
    assert_close(jax.jit(optimizer.eval_trainables)(state, trainables), shown)
    return by_path(trainables), by_path(shown)


# an optimizer, and for each leaf in order the one that trains it
GROUPS = optim.Groups(("dense/bias", AVERAGE), ("**/kernel", SLOW), ("temperature", FREE))
CASES = {
    "one group": (optim.Groups(("**", AVERAGE)), [AVERAGE] * 4),
    "several groups": (GROUPS, [AVERAGE, SLOW, SLOW, FREE]),
    "a group that averages and one that does not": (
        optim.Groups(("**/kernel", AVERAGE), ("**", PLAIN)),
        [PLAIN, AVERAGE, AVERAGE, PLAIN],
    ),
    "two groups with the same slot": (
        optim.Groups(("**/bias", optim.Average(PLAIN, None)), ("**", AVERAGE)),
        [optim.Average(PLAIN, None), AVERAGE, AVERAGE, AVERAGE],
    ),
    "groups in a group": (
        optim.Groups(("dense/*", optim.Groups(("**/bias", SLOW), ("**", FREE))), ("**", AVERAGE)),
        [SLOW, FREE, AVERAGE, AVERAGE],
    ),
    "frozen leaves": (optim.Freeze(AVERAGE, ("dense/*",)), [None, None, AVERAGE, AVERAGE]),
    "frozen leaves of groups": (optim.Freeze(GROUPS, ("**/bias",)), [None, SLOW, SLOW, FREE]),
    "a group with frozen leaves": (
        optim.Groups(("dense/*", optim.Freeze(FREE, ("dense/bias",))), ("**", AVERAGE)),
        [None, FREE, AVERAGE, AVERAGE],
    ),
    "clipped groups": (optim.ClipValue(GROUPS, 1e6), [AVERAGE, SLOW, SLOW, FREE]),
    "a whole stack": (
        optim.SkipNonFinite(optim.ClipGlobalNorm(optim.Freeze(optim.ClipNorm(GROUPS, 1e6), ("temperature",)), 1e6)),
        [AVERAGE, SLOW, SLOW, None],
    ),
    "beside Muon": (
        optim.ClipGlobalNorm(optim.Muon(matrices=("dense/kernel",), rest=optim.Freeze(FREE, ("dense/bias",))), 1e6),
        [None, optim.Muon(matrices=("dense/kernel",)), FREE, FREE],
    ),
    "gathered gradients": (optim.Accumulate(GROUPS, 1), [AVERAGE, SLOW, SLOW, FREE]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_leaf_is_averaged_by_the_optimizer_that_trains_it(case):
    optimizer, members = CASES[case]
    _, shown = evaluated(optimizer)
    first = by_path(tree("float32"))
    for path, member in zip(LEAVES, members, strict=True):
        if member is None:
            np.testing.assert_array_equal(shown[path], first[path])
        else:
            assert_close(shown[path], evaluated(member)[1][path])


@pytest.mark.parametrize("optimizer", [AVERAGE, SLOW, FREE], ids=lambda one: type(one).__name__)
def test_the_weights_to_evaluate_differ_from_those_to_train(optimizer):
    trained, shown = evaluated(optimizer)
    assert all((trained[path] != shown[path]).all() for path in LEAVES)


def test_an_average_around_groups_averages_all_leaves():
    groups = optim.Groups(("**/kernel", SLOW), ("**", FREE))
    alone = [steps(groups, count)[0] for count in range(1, 6)]
    assert_close(
        evaluated(optim.Average(groups, None))[1], by_path(jax.tree.map(lambda *leaves: sum(leaves) / 5, *alone)), 1e-5
    )


def test_the_average_stays_while_gradients_accumulate():
    optimizer = optim.Accumulate(AVERAGE, 2)
    assert_close(evaluated(optimizer, count=4)[1], evaluated(optimizer, count=5)[1])


def test_leaves_without_an_average_are_returned_unchanged():
    optimizer = optim.Groups(("**/kernel", AVERAGE), ("**", optim.Adam(1e-2, rounding=optim.MasterWeights())))
    trainables = tree("bfloat16")
    shown = optimizer.eval_trainables(optimizer.init(trainables), trainables)
    assert shown["dense"]["bias"] is trainables["dense"]["bias"] and shown["temperature"] is trainables["temperature"]


@pytest.mark.parametrize("inner", [AVERAGE, SLOW, FREE], ids=lambda one: type(one).__name__)
def test_averages_of_narrow_weights_are_in_their_dtype(inner):
    optimizer = optim.ClipNorm(optim.Groups(("**/kernel", inner), ("**", PLAIN)))
    _, shown = evaluated(optimizer, trainables=tree("bfloat16"))
    assert {leaf.dtype.name for leaf in shown.values()} == {"bfloat16"}


def test_with_master_weights_the_masters_are_averaged():
    start = tree("bfloat16")
    wide = evaluated(FREE, trainables=jax.tree.map(lambda w: w.astype(jnp.float32), start))[1]
    narrow = evaluated(optim.ScheduleFree(1e-2, rounding=optim.MasterWeights()), trainables=start)[1]
    for path in LEAVES:
        np.testing.assert_allclose(np.float32(narrow[path]), wide[path], rtol=2**-8)
