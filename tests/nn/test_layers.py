"""Linear, LayerNorm, Dropout and Embed, beyond the contract."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlax import nn, ops

RNG = jax.random.key(0)


@settings(max_examples=8, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    features=st.integers(1, 5),
    bias=st.booleans(),
)
def test_linear_is_a_matrix_product_for_any_rank_and_size(shape, features, bias):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    layer = nn.Linear(features, bias=bias)
    trainables, _ = layer.init(RNG, x)
    y, _ = layer.fwd(x, trainables)
    want = np.asarray(x) @ np.asarray(trainables["kernel"]) + (np.asarray(trainables["bias"]) if bias else 0)
    assert y.shape == (*shape[:-1], features)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


@settings(max_examples=8, deadline=None)
@given(shape=st.lists(st.integers(1, 5), min_size=2, max_size=4), count=st.integers(1, 3))
def test_layer_norm_normalizes_over_its_axes(shape, count):
    axes = tuple(range(-min(count, len(shape) - 1), 0))
    x = np.random.default_rng(0).normal(3.0, 2.0, size=shape).astype(np.float32)
    y = ops.layer_norm(jnp.asarray(x), axes=axes, eps=1e-5)
    want = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean_and_drops_the_rate(rate):
    y, _ = nn.Dropout(rate).fwd(jnp.ones((200, 500)), None, rng=RNG)
    assert abs(float((y == 0).mean()) - rate) < 0.01
    assert abs(float(y.mean()) - 1) < 0.02
    np.testing.assert_allclose(y[y != 0], 1 / (1 - rate), rtol=1e-6)


def test_dropout_is_exactly_the_identity_at_inference_and_at_rate_0():
    x = jnp.ones((3, 4))
    assert nn.Dropout(0.5).fwd(x, None, inference_mode=True)[0] is x
    assert nn.Dropout(0.0).fwd(x, None)[0] is x
    np.testing.assert_array_equal(nn.Dropout(1.0).fwd(x, None, rng=RNG)[0], 0)


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_a_rate_that_is_not_a_probability_is_an_error(rate):
    with pytest.raises(ValueError, match="must be a probability"):
        nn.Dropout(rate)


def test_embed_gives_nan_outside_the_vocabulary():
    embed = nn.Embed(5, 3)
    trainables, _ = embed.init(RNG, jnp.arange(2))
    y, _ = embed.fwd(jnp.asarray([0, 4, 5, -1]), trainables)
    assert not jnp.isnan(y[:2]).any() and jnp.isnan(y[2:]).all()


def test_embed_of_anything_but_integers_is_an_error():
    with pytest.raises(TypeError, match="must be integers; cast it to int32"):
        nn.Embed(5, 3).init(RNG, jnp.ones(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_64_bit_indices_out_of_bounds_give_nan_and_no_gradient(dtype):
    with jax.enable_x64(True):
        table, logits = jnp.ones((4, 3), dtype), jnp.ones((4, 4), dtype)
        indices = jnp.asarray([2, 2**40, 2**32, -(2**40)])
        losses = ops.softmax_cross_entropy(logits, indices)
        losses_of_head = ops.linear_cross_entropy(jnp.ones((4, 3), dtype), jnp.ones((3, 4), dtype), indices)
        losses_of_sequence = ops.ctc_loss(jnp.ones((2, 5, 4), dtype), indices[:2, None])
        rows, transpose = jax.vjp(lambda table: ops.embedding(indices, table), table)
        (gradient,) = transpose(jnp.ones_like(rows))
    for values in (rows[:, 0], losses, losses_of_head, losses_of_sequence):
        assert not jnp.isnan(values[0]) and jnp.isnan(values[1:]).all()
    assert gradient[:, 0].tolist() == [0, 0, 1, 0]


def test_an_embedding_of_vectors_is_the_tied_output_layer():
    embed, x = nn.Embed(5, 3), jax.random.normal(RNG, (2, 4, 3))
    trainables, _ = embed.init(RNG, x)
    logits, _ = embed.fwd(x, trainables)
    np.testing.assert_allclose(logits, x @ trainables["table"].T, rtol=1e-6)
    with pytest.raises(TypeError, match="float16"):
        embed.fwd(x.astype("float16"), trainables)


@pytest.mark.parametrize("axes", [(), (0,), (-1, -1), (-4,)])
def test_axes_that_do_not_exist_are_errors(axes):
    for layer in (nn.Bias(axes=axes), nn.Scaler(axes=axes), nn.LayerNorm(axes=axes)):
        with pytest.raises(ValueError, match=r"axes|axis -4"):
            layer.init(RNG, jnp.ones((2, 3, 4)))


def test_the_error_of_linear_names_both_shapes():
    linear = inspect.unwrap(ops.linear)  # without the types that only the tests check
    with pytest.raises(ValueError, match=r"\(2, 5\) but the kernel \(6, 3\)"):
        linear(jnp.ones((2, 5)), jnp.ones((6, 3)))


def test_two_dtypes_in_one_op_are_an_error():
    with pytest.raises(TypeError, match="x is float16, kernel is float32"):
        ops.linear(jnp.ones((2, 3), jnp.float16), jnp.ones((3, 4), jnp.float32))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("ReLU", "mlax.F(jax.nn.relu) makes a layer of the function."),
        ("LeakyReLU", "mlax.F(jax.nn.leaky_relu) makes a layer of the function."),
        ("Conv2d", "nn.Conv takes any number of axes."),
        ("ConvTranspose1d", "nn.ConvTranspose takes any number of axes."),
        ("AvgPool2d", "write nn.MeanPool."),
        ("Dropout2d", "write nn.ChannelDropout."),
        ("Sequential", "write mlax.Series."),
        ("LSTM", "write mlax.Recurrent(nn.LSTMCell(features))."),
        ("CrossEntropyLoss", "a loss is a function, mlax.ops.softmax_cross_entropy, which the objective calls."),
        ("HingeEmbeddingLoss", "a loss is a function, such as one of optax, which the objective calls."),
        ("MultiheadAttention", "did you mean MultiHeadAttention?"),
        ("functional", "write mlax.ops, jax.nn or jax.numpy."),
        ("Dense", "write nn.Linear."),
        ("Linaer", "did you mean Linear?"),
    ],
)
def test_the_error_of_an_unknown_layer_suggests_the_closest(name, advice):
    with pytest.raises(AttributeError) as caught:
        getattr(nn, name)
    assert str(caught.value) == f"mlax.nn has no {name}; {advice}"


def test_the_error_of_a_name_like_no_layer_lists_all():
    with pytest.raises(AttributeError, match=r"mlax\.nn has no Xyzzy; it has GLU, MLP, AdaptivePool, "):
        nn.Xyzzy  # noqa: B018
    assert not hasattr(nn, "__wrapped__")
