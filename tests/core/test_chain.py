import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import dtypes, nn, place
from tests.layers import Block, Modulated


def check_same(model, x):
    variables = model.init(jax.random.key(0), x)
    apart, *separate = mlax.unstack(model, *variables)
    y, state = model.fwd(x, *variables, inference_mode=True)
    again, new = apart.fwd(x, *separate, inference_mode=True)
    for one, other in zip(jax.tree.leaves(y), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert mlax.paths(new) == mlax.paths(separate[1])
    shapes = jax.eval_shape(apart.init, jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, tuple(separate))
    return apart, mlax.unstack(model, state)[1], new


def test_an_unstacked_model_computes_the_same_with_one_entry_of_the_variables_for_each_layer():
    model = mlax.Series(blocks=mlax.Repeat(mlax.Repeat(Block(6), 2), 3), head=nn.Linear(2))
    apart, state, new = check_same(dtypes.Mixed(model, compute="float32"), jnp.ones((4, 6)))
    assert isinstance(mlax.get(apart, "blocks/layers/2"), mlax.Chain)
    assert "blocks/layers/2/layers/1/count/calls" in mlax.paths(new)
    assert mlax.paths(state) == mlax.paths(new)
    assert mlax.unstack(apart)[0] == apart


def test_every_unstacked_layer_gets_the_inputs_after_the_first():
    check_same(mlax.Repeat(Modulated(6), 3), (jnp.ones((4, 6)), jnp.ones((4, 3))))


def test_a_repeat_inside_of_a_map_is_unstacked_along_its_axis():
    check_same(mlax.Map(mlax.Repeat(Block(6), 2), axis=1, variables=0), jnp.ones((4, 3, 6)))


def test_a_repeat_that_is_streamed_stays_stacked():
    model = mlax.Series(blocks=place.Stream(mlax.Repeat(nn.Linear(6), 3)))
    trainables, _ = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((4, 6)))
    assert mlax.unstack(model, trainables) == (model, trainables)


def test_a_chain_without_layers_is_refused():
    with pytest.raises(TypeError, match="must be a tuple of layers, at least one"):
        mlax.Chain(())
