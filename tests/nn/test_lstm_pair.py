"""Two LSTM layers in one scan compute what two scans compute, and are chosen where that is faster."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import nn

CELLS = inspect.getmodule(nn.LSTMCell)
SHAPE = (3, 5, 6)  # b, t, d


def layers(*cells, **options):
    return mlax.Series(**{f"layer{number}": mlax.Recurrent(cell, **options) for number, cell in enumerate(cells)})


def variables(model, dtype="float64"):
    x = jax.random.normal(jax.random.key(1), SHAPE, dtype)
    trainables, _ = model.init(jax.random.key(0), x)
    leaves, treedef = jax.tree.flatten(trainables)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    noise = [jax.random.normal(key, leaf.shape, leaf.dtype) for leaf, key in zip(leaves, keys, strict=True)]
    return x, jax.tree.map(lambda leaf, noise: leaf + 0.1 * noise, trainables, treedef.unflatten(noise))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def pairs(monkeypatch):
    """As on a GPU; a list of the inputs of each pair."""
    found = []
    monkeypatch.setattr(CELLS, "is_pair_faster", lambda x, *_: found.append(x.shape) or True)
    return found


@pytest.mark.parametrize(
    ("stack", "options"),
    [(mlax.Series, {}), (nn.Stacked, {"recurrent_bias": True}), (mlax.Series, {"bias": False})],
)
def test_a_pair_in_one_scan_equals_two_scans_with_its_gradients(pairs, monkeypatch, options, stack):
    model = stack(*(mlax.Recurrent(nn.LSTMCell(4, **options)) for _ in range(2)))
    x, trainables = variables(model)

    def loss(trainables, x):
        return jnp.sum(jnp.sin(model.fwd(x, trainables)[0]))

    joined = jax.jit(jax.value_and_grad(loss, (0, 1)))(trainables, x)
    assert pairs == [(5, 3, 6)]
    monkeypatch.setattr(CELLS, "is_pair_faster", lambda *_: False)
    plain = jax.jit(jax.value_and_grad(lambda *given: loss(*given), (0, 1)))(trainables, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), joined, plain)


def test_a_pair_has_forward_mode_and_second_derivatives(pairs, monkeypatch):
    model = layers(nn.LSTMCell(4), nn.LSTMCell(4))
    x, trainables = variables(model)

    def slope(x):
        return jax.jvp(lambda x: jnp.sum(jnp.sin(model.fwd(x, trainables)[0])), (x,), (jnp.ones_like(x),))[1]

    joined = jax.jit(jax.grad(slope))(x)
    assert pairs
    monkeypatch.setattr(CELLS, "is_pair_faster", lambda *_: False)
    np.testing.assert_allclose(joined, jax.jit(jax.grad(lambda x: slope(x)))(x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_pair_keeps_the_dtype(pairs, dtype):
    model = layers(nn.LSTMCell(4), nn.LSTMCell(4))
    x, trainables = variables(model, dtype)
    y, _ = model.fwd(x, trainables)
    wide = jax.tree.map(lambda leaf: leaf.astype("float64"), (x, trainables))
    assert y.dtype == dtype and len(pairs) == 1
    np.testing.assert_allclose(y.astype("float64"), model.fwd(*wide)[0], atol=8 * float(jnp.finfo(dtype).eps))


def test_of_three_layers_two_are_a_pair_and_the_third_is_scanned(pairs):
    model = layers(nn.LSTMCell(4), nn.LSTMCell(4), nn.LSTMCell(4))
    x, trainables = variables(model)
    model.fwd(x, trainables)
    assert pairs == [(5, 3, 6)]


@pytest.mark.parametrize(
    "model",
    [
        layers(nn.LSTMCell(4), nn.LSTMCell(3)),
        layers(nn.LSTMCell(4), nn.GRUCell(4)),
        layers(nn.LSTMCell(4), nn.LSTMCell(4, peephole=True)),
        layers(nn.LSTMCell(4), nn.LSTMCell(4), reverse=True),
        layers(nn.LSTMCell(4), nn.LSTMCell(4), unroll=2),
        layers(nn.LSTMCell(4), nn.LSTMCell(4), stateful=True),
        mlax.Series(mlax.Recurrent(nn.LSTMCell(4)), nn.Dropout(0.1), mlax.Recurrent(nn.LSTMCell(4))),
    ],
    ids=repr,
)
def test_other_neighbours_are_scanned_one_by_one(pairs, model):
    x = jnp.ones(SHAPE)
    trainables, non_trainables = model.init(jax.random.key(0), x)
    model.fwd(x, trainables, non_trainables, inference_mode=True)
    assert not pairs


def test_weights_of_another_shape_are_refused_as_without_a_pair(pairs):
    model = layers(nn.LSTMCell(4), nn.LSTMCell(4))
    _, trainables = variables(model)
    with pytest.raises(ValueError, match="kernel"):
        model.fwd(jnp.ones((3, 5, 7), "float64"), trainables)
    assert not pairs


def test_on_a_cpu_no_layers_are_a_pair():
    model = layers(nn.LSTMCell(4), nn.LSTMCell(4))
    x, trainables = variables(model)
    assert str(jax.make_jaxpr(lambda x: model.fwd(x, trainables)[0])(x)).count("scan[") == 2


@pytest.mark.parametrize("times", [1, 4, 9])
def test_idle_steps_at_the_end_change_nothing(times):
    x = jax.random.normal(jax.random.key(0), (times, 2, 3), "float64")
    model = mlax.Series(a=mlax.Recurrent(nn.LSTMCell(4), axis=0), b=mlax.Recurrent(nn.LSTMCell(4), axis=0))
    trainables, _ = model.init(jax.random.key(1), x)
    for unroll in (1, 4):
        y = CELLS.lstm_pair(x, trainables["a"], trainables["b"], unroll=unroll)
        np.testing.assert_allclose(y, model.fwd(x, trainables)[0], rtol=1e-12)


def test_the_number_of_steps_in_an_iteration_leaves_few_idle():
    best_unroll = inspect.getmodule(CELLS.lstm_pair).best_unroll
    assert [best_unroll(steps) for steps in (257, 64, 10, 5)] == [8, 8, 2, 2]
