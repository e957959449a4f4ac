"""Keys derive from the names of parts."""

import jax
import jax.numpy as jnp

import mlax
from mlax import nn
from tests.asserts import unequal_leaves

X = jnp.ones((2, 6))


def test_adding_a_part_does_not_reseed_the_others():
    before, _ = mlax.Series(a=nn.Linear(6), c=nn.Linear(6)).init(jax.random.key(0), X)
    after, _ = mlax.Series(a=nn.Linear(6), b=nn.Linear(6), c=nn.Linear(6)).init(jax.random.key(0), X)
    assert not unequal_leaves(before, {"a": after["a"], "c": after["c"]})


def test_renaming_a_part_does_not_reseed_the_others():
    before, _ = mlax.Series(a=nn.Linear(6), b=nn.Linear(6)).init(jax.random.key(0), X)
    after, _ = mlax.Series(a=nn.Linear(6), other=nn.Linear(6)).init(jax.random.key(0), X)
    assert not unequal_leaves(before["a"], after["a"])
    assert not jnp.array_equal(before["b"]["kernel"], after["other"]["kernel"])


def test_dropping_the_bias_keeps_the_kernel():
    with_bias, _ = nn.Linear(4).init(jax.random.key(0), X)
    without, _ = nn.Linear(4, bias=False).init(jax.random.key(0), X)
    assert not unequal_leaves(with_bias["kernel"], without["kernel"])


def test_two_calls_of_one_part_drop_different_elements():
    @mlax.frozen
    class Twice(mlax.Composite):
        drop: nn.Dropout = nn.Dropout(0.5)

        def wire(self, sub, x):
            return sub.drop(x), sub.drop(x)

    (first, second), _ = Twice().fwd(jnp.ones(64), None, rng=jax.random.key(0))
    assert not jnp.array_equal(first, second)


def test_each_repetition_drops_different_elements():
    @mlax.frozen
    class Trace(mlax.Composite):
        drop: nn.Dropout = nn.Dropout(0.5)

        def wire(self, sub, x):
            return sub.drop(x)

    y, _ = mlax.Repeat(Trace(), 3).fwd(jnp.ones(4096), None, rng=jax.random.key(0))
    assert 0.08 < float((y != 0).mean()) < 0.17  # 1/8 survive three independent halvings, 1/2 would survive one mask


def test_legacy_uint32_keys_work():
    trainables, _ = nn.Linear(4).init(jax.random.PRNGKey(0), X)
    assert not unequal_leaves(trainables, nn.Linear(4).init(jax.random.key(0), X)[0])
