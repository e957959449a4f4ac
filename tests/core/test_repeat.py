"""Repeat computes the same in every mode, from the same variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import nn
from tests.arrays import normal
from tests.layers import Block, Count

X = normal(4, 6)
RNG = jax.random.key(1)


def value_and_grad(mode):
    layer = mlax.Repeat(Block(6), 3, mode=mode)
    trainables, state = layer.init(jax.random.key(0), X)

    def loss(trainables, x):
        y, new = layer.fwd(x, trainables, state, rng=RNG)
        return (y * y).sum(), (y, new)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(trainables, X)


@pytest.mark.parametrize("mode", ["remat", "unroll"])
def test_all_modes_agree(mode):
    for a, b in zip(jax.tree.leaves(value_and_grad("scan")), jax.tree.leaves(value_and_grad(mode)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["scan", "remat", "unroll"])
def test_state_is_kept_for_each_repetition(mode):
    layer = mlax.Repeat(Count(), 3, mode=mode)
    _, state = layer.init(RNG, X)
    _, state = layer.fwd(X, None, state)
    _, state = layer.fwd(X, None, state)
    np.testing.assert_array_equal(state["stacked"]["calls"], [2, 2, 2])


@pytest.mark.parametrize("mode", ["scan", "remat", "unroll"])
def test_a_layer_without_variables_can_be_repeated(mode):
    y, state = mlax.Repeat(mlax.F(jnp.sin), 3, mode=mode).fwd(X, None)
    np.testing.assert_allclose(y, np.sin(np.sin(np.sin(X))), rtol=1e-6)
    assert state is None


def test_each_repetition_has_its_own_weights():
    trainables, _ = mlax.Repeat(nn.Linear(6), 3).init(RNG, X)
    first, second, third = trainables["stacked"]["kernel"]
    assert not jnp.array_equal(first, second) and not jnp.array_equal(second, third)


def test_a_pytree_passes_through_repetitions():
    swap = mlax.F(lambda pair: (pair[1], pair[0]))
    y, _ = mlax.Repeat(swap, 3).fwd((X, -X), None)
    np.testing.assert_array_equal(y[0], -X)


def test_a_repeat_inside_a_repeat_stacks_twice():
    trainables, _ = mlax.Repeat(mlax.Repeat(nn.Linear(6), 2, mode="unroll"), 3).init(RNG, X)
    assert trainables["stacked"]["stacked"]["kernel"].shape == (3, 2, 6, 6)


def test_the_program_of_a_scan_does_not_grow_with_its_length():
    def size(times, mode):
        layer = mlax.Repeat(nn.Linear(6), times, mode=mode)
        trainables, _ = jax.eval_shape(layer.init, RNG, X)
        return len(jax.jit(layer.fwd).lower(X, trainables).as_text())

    assert size(20, "scan") < 1.05 * size(2, "scan")
    assert size(20, "unroll") > 3 * size(2, "unroll")


def test_invalid_options_are_errors():
    with pytest.raises(ValueError, match="times is 0"):
        mlax.Repeat(nn.Linear(6), 0)
    with pytest.raises(ValueError, match="mode is 'unrolled', but must be one of scan, remat, unroll"):
        mlax.Repeat(nn.Linear(6), 2, mode="unrolled")
    trainables, _ = mlax.Repeat(nn.Linear(6), 2).init(RNG, X)
    with pytest.raises(ValueError, match="leading axis of 3"):
        mlax.Repeat(nn.Linear(6), 3).fwd(X, trainables)


def test_unrolled_repetitions_are_separated_by_barriers_on_a_cpu():
    layer = mlax.Repeat(mlax.Residual(nn.Linear(6)), 3, mode="unroll")
    with jax.default_device(jax.devices("cpu")[0]):
        x = jnp.ones((4, 6))
        trainables, _ = layer.init(jax.random.key(0), x)
        compiled = jax.jit(jax.grad(lambda t: (layer.fwd(x, t)[0] ** 2).sum())).lower(trainables).compile()
    assert compiled.as_text().count(" conditional(") >= 5


@pytest.mark.parametrize("mode", ["scan", "remat"])
@pytest.mark.parametrize("transform", [lambda fwd: fwd, jax.jit])
def test_a_nan_in_a_repetition_is_located_by_its_index_and_part(mode, transform):
    block = mlax.Series(down=nn.Bias(), root=mlax.F(jnp.sqrt))
    layer = mlax.Series(blocks=mlax.Repeat(block, 3, mode=mode))
    trainables, _ = layer.init(jax.random.key(0), X)
    x = jnp.ones_like(X)
    trainables = jax.tree.map(lambda leaf: leaf.at[2].set(-2), trainables)  # so that the third takes the root of -1
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        transform(layer.fwd)(x, trainables)
    assert "in blocks/2/root, called on float32[4, 6]" in caught.value.__notes__
