"""Series, Parallel, Residual, F, Remat, Map and Tied, beyond the contract."""

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


def test_unnamed_parts_are_named_by_class_and_rank():
    model = mlax.Series(nn.Linear(6), nn.LayerNorm(), nn.Linear(6), head=nn.Linear(2))
    assert set(mlax.layers(model)) == {"linear_0", "layer_norm_0", "linear_1", "head"}
    assert repr(model).startswith("Series(linear_0=Linear(6), layer_norm_0=LayerNorm()")


def test_an_empty_series_is_the_identity():
    assert mlax.Series().init(RNG, X) == (None, None)
    np.testing.assert_array_equal(mlax.Series().fwd(X, None)[0], X)


def test_a_part_called_twice_shares_its_weights_and_threads_its_state():
    @mlax.frozen
    class Twice(mlax.Composite):
        up: nn.Linear = nn.Linear(6)
        count: Count = Count()

        def wire(self, sub, x):
            return sub.count(sub.up(sub.count(sub.up(x))))

    trainables, state = Twice().init(RNG, X)
    assert set(mlax.paths(trainables)) == {"up/kernel", "up/bias"}
    _, state = Twice().fwd(X, trainables, state)
    assert state["count"]["calls"] == 2


def test_a_function_receives_the_key_or_the_mode_if_it_has_a_parameter_for_it():
    def noisy(x, rng, inference_mode):
        return x if inference_mode else x + jax.random.normal(rng, x.shape)

    layer = mlax.F(noisy)
    assert not jnp.array_equal(layer.fwd(X, None, rng=RNG)[0], X)
    np.testing.assert_array_equal(layer.fwd(X, None, inference_mode=True)[0], X)
    with pytest.raises(ValueError, match="takes a key, but rng is None; pass rng="):
        mlax.F(lambda x, rng: x).fwd(X, None)


def test_anything_but_a_function_is_an_error():
    with pytest.raises(TypeError, match="is not a function"):
        mlax.F(3)
    with pytest.raises(TypeError, match="is already a layer"):
        mlax.F(nn.Linear(3))


def test_the_error_of_a_residual_that_changes_the_shape_suggests_a_shortcut():
    with pytest.raises(ValueError, match="pass a shortcut layer"):
        mlax.Residual(nn.Linear(3)).init(RNG, X)


def test_remat_stores_less_and_computes_the_same():
    block = Block(6)
    trainables, state = block.init(RNG, X)

    def stored(layer):
        _, pullback = jax.vjp(lambda t: layer.fwd(X, t, state, inference_mode=True)[0], trainables)
        return sum(leaf.size for leaf in jax.tree.leaves(pullback))

    assert stored(mlax.Remat(block)) < stored(block)
    for layer in (mlax.Remat(block), mlax.Remat(block, policy=jax.checkpoint_policies.dots_saveable)):
        np.testing.assert_allclose(
            layer.fwd(X, trainables, state, rng=RNG)[0], block.fwd(X, trainables, state, rng=RNG)[0], rtol=1e-6
        )


def test_map_gives_each_slice_its_own_key():
    y, _ = mlax.Map(nn.Dropout(0.5), axis=1).fwd(jnp.ones((64, 4)), None, rng=RNG)
    assert not jnp.array_equal(y[:, 0], y[:, 1])


def test_map_has_state_for_each_slice_only_with_variables():
    with pytest.raises(ValueError, match="pass variables=0"):
        mlax.Map(Count()).fwd(X, None, {"calls": jnp.zeros((), jnp.int32)})
    layer = mlax.Map(Count(), variables=0)
    _, state = layer.init(RNG, X)
    _, state = layer.fwd(X, None, state)
    np.testing.assert_array_equal(state["stacked"]["calls"], np.ones(6))


def test_map_over_an_axis_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="which has no axis 3"):
        mlax.Map(nn.Linear(2), axis=3).init(RNG, X)
    with pytest.raises(ValueError, match=r"has the sizes \[3, 6\]"):
        mlax.Map(mlax.F(lambda pair: pair[0])).init(RNG, (X, X[:, :3]))


AUTOENCODER = mlax.Series(up=nn.Linear(8), tanh=mlax.F(jnp.tanh), down=nn.Linear(6))


def test_tied_gradients_are_the_sum_over_all_uses():
    tied = mlax.Tied(AUTOENCODER, mlax.Tie("down/kernel", to="up/kernel", transpose=True))
    trainables, _ = tied.init(RNG, X)
    full = mlax.merge(trainables, {"down": {"kernel": trainables["up"]["kernel"].T}})

    def loss(layer):
        return lambda trainables: (layer.fwd(X, trainables)[0] ** 2).sum()

    tied_grads, full_grads = jax.grad(loss(tied))(trainables), jax.grad(loss(AUTOENCODER))(full)
    wanted = full_grads["up"]["kernel"] + full_grads["down"]["kernel"].T
    np.testing.assert_allclose(tied_grads["up"]["kernel"], wanted, rtol=1e-5, atol=1e-5)


def test_ties_of_different_shapes_are_errors():
    with pytest.raises(TypeError):
        mlax.Tied(jax.nn.relu)
    with pytest.raises(TypeError, match=r"is not an mlax.Tie; pass Tied\(model, Tie\(leaf, to=path\)"):
        mlax.Tied(AUTOENCODER, "down/kernel")
    with pytest.raises(ValueError, match="pass transpose=True"):
        mlax.Tied(AUTOENCODER, mlax.Tie("down/kernel", to="up/kernel")).init(RNG, X)
    with pytest.raises(ValueError, match="did you mean 'down/kernel'"):
        mlax.Tied(AUTOENCODER, mlax.Tie("down/kernl", to="up/kernel")).init(RNG, X)


def test_a_plain_function_is_wrapped_where_a_layer_is_expected():
    explicit = mlax.Series(nn.Linear(3), mlax.F(jax.nn.relu), out=mlax.F(jnp.tanh))
    assert mlax.Series(nn.Linear(3), jax.nn.relu, out=jnp.tanh) == explicit
    assert mlax.Parallel(jax.nn.relu) == mlax.Parallel(mlax.F(jax.nn.relu))
    assert mlax.Residual(jax.nn.relu, shortcut=jnp.tanh) == mlax.Residual(
        mlax.F(jax.nn.relu), shortcut=mlax.F(jnp.tanh)
    )


def test_a_long_repr_is_wrapped_and_still_code():
    model = mlax.Series(**{f"linear{i}": nn.Linear(100 + i) for i in range(8)})
    assert repr(model).splitlines()[:2] == ["Series(", "    linear0=Linear(100),"]
    assert eval(repr(model), {"Series": mlax.Series, "Linear": nn.Linear}) == model
