"""What the dropouts drop, how often, and what they keep."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlax import nn, ops

RNG = jax.random.key(0)
TORCH = np.load(Path(__file__).parents[1] / "references" / "norms.npz")
KINDS = [nn.Dropout, nn.ChannelDropout, nn.PathDropout, nn.AlphaDropout]


@pytest.mark.parametrize("kind", KINDS)
def test_inference_and_rate_0_return_the_input(kind):
    x = jnp.ones((3, 4))
    assert kind(0.5).fwd(x, None, inference_mode=True)[0] is x
    assert kind(0.0).fwd(x, None)[0] is x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rate_1_returns_zeros_of_the_same_dtype(kind, dtype):
    y, _ = kind(1.0).fwd(jnp.ones((3, 4), dtype), None, rng=RNG)
    assert y.dtype == dtype
    np.testing.assert_array_equal(np.asarray(y, np.float32), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_training_without_a_key_says_what_to_pass(kind):
    with pytest.raises(ValueError, match=r"dropout needs a key; pass rng=, or inference_mode=True"):
        kind(0.5).fwd(jnp.ones((3, 4)), None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
def test_a_rate_that_is_not_a_probability_is_an_error(kind, rate):
    with pytest.raises(ValueError, match=f"^{kind.__name__}: rate is .*must be a probability"):
        kind(rate)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_stays_empty(kind):
    assert kind(0.5).fwd(jnp.ones((0, 3)), None, rng=RNG)[0].shape == (0, 3)


@settings(max_examples=8, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    axes=st.sets(st.integers(0, 3), max_size=3),
    seed=st.integers(0, 99),
)
def test_elements_that_share_an_index_along_the_axes_are_dropped_together(shape, axes, seed):
    axes = tuple(axis for axis in axes if axis < len(shape))
    x = np.random.default_rng(seed).uniform(1, 2, shape).astype(np.float32)
    y = np.asarray(jax.jit(lambda x: ops.dropout(x, jax.random.key(seed), 0.5, axes=axes))(x))
    others = tuple(axis for axis in range(len(shape)) if axis not in axes)
    kept = y != 0
    np.testing.assert_array_equal(kept.any(others), kept.all(others))
    np.testing.assert_allclose(y, np.where(kept, 2 * x, 0), rtol=1e-6)


@pytest.mark.parametrize("rate", [0.1, 0.7])
@pytest.mark.parametrize(
    "kind, shape, own",
    [
        (nn.ChannelDropout, (200, 3, 2, 100), (0, 3)),
        (lambda rate: nn.ChannelDropout(rate, axis=1), (200, 100, 3, 2), (0, 1)),
        (nn.PathDropout, (20_000, 3, 2), (0,)),
    ],
    ids=["channels last", "channels first", "paths"],
)
def test_channels_and_paths_are_dropped_at_the_rate(kind, shape, own, rate):
    y, _ = kind(rate).fwd(jnp.ones(shape), None, rng=RNG)
    others = tuple(axis for axis in range(len(shape)) if axis not in own)
    y = np.asarray(y)
    np.testing.assert_array_equal(y.min(others), y.max(others))
    dropped = y.min(others) == 0
    assert abs(dropped.mean() - rate) < 0.015
    np.testing.assert_allclose(y[y != 0], 1 / (1 - rate), rtol=1e-6)
    assert len(np.unique(dropped.reshape(len(dropped), -1).mean(1))) > 1  # each example is sampled independently


@pytest.mark.parametrize("kind", [nn.Dropout, nn.ChannelDropout, nn.PathDropout])
def test_the_gradient_is_the_scale_of_each_element(kind):
    x = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (6, 2, 5)), jnp.float32)
    y, back = jax.vjp(lambda x: kind(0.5).fwd(x, None, rng=RNG)[0], x)
    np.testing.assert_allclose(back(jnp.ones_like(y))[0], y / x, rtol=1e-6)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_alpha_dropout_has_the_two_values_of_pytorch(rate):
    for x in (0, 1):
        y, _ = nn.AlphaDropout(rate).fwd(jnp.full((1000,), float(x)), None, rng=RNG)
        np.testing.assert_allclose(np.unique(y), TORCH[f"alpha_dropout {rate}/of_{x}"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_alpha_dropout_keeps_mean_0_and_variance_1(rate):
    x = jax.random.normal(RNG, (400, 500))
    y, _ = nn.AlphaDropout(rate).fwd(x, None, rng=jax.random.key(1))
    _, counts = np.unique(y, return_counts=True)
    assert abs(float(y.mean())) < 0.02
    assert abs(float(y.var()) - 1) < 0.02
    assert abs(counts.max() / y.size - rate) < 0.01  # what is dropped becomes one number


def test_channel_and_path_dropout_need_enough_axes():
    for layer, shape, words in [
        (nn.ChannelDropout(0.5), (), "has no axis -1"),
        (nn.ChannelDropout(0.5), (3,), "is the batch axis"),
        (nn.PathDropout(0.5), (), "is a scalar but needs a batch axis"),
    ]:
        with pytest.raises(ValueError, match=words):
            layer.init(RNG, jnp.ones(shape))


def test_of_several_rates_paths_are_dropped_at_that_of_the_index():
    layer, x = nn.PathDropout((0.0, 0.75, 0.25)), jnp.ones((4000, 2), "bfloat16")
    drop = jax.jit(lambda index: layer.fwd((x, index), None, rng=jax.random.key(0))[0])
    for index, rate in enumerate(layer.rate):
        y = drop(jnp.asarray(index, "int32"))
        assert y.dtype == x.dtype
        np.testing.assert_allclose(jnp.mean(y == 0, dtype="float32"), rate, atol=0.03)
        np.testing.assert_allclose(np.unique(np.asarray(y, "float32"))[-1], 1 / (1 - rate), rtol=4e-3)
    assert layer.fwd((x, jnp.asarray(1, "int32")), None, inference_mode=True)[0] is x
    for wrong, message in [((), "must be a probability"), ((0.5, 1.0), "of several all must be below 1")]:
        with pytest.raises(ValueError, match=message):
            nn.PathDropout(wrong)
    with pytest.raises(ValueError, match="must be a pair of x and an index"):
        layer.fwd(x, None, rng=jax.random.key(0))
    with pytest.raises(ValueError, match="pass index="):
        ops.dropout(x, jax.random.key(0), (0.5, 0.5))
