"""Mixed is the one place where dtypes change, and it changes them as declared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import dtypes, nn
from tests.arrays import normal
from tests.layers import Block

X = normal(4, 6)
RNG = jax.random.key(0)
MODEL = mlax.Series(block=mlax.Repeat(Block(6, dropout=0.0), 2), head=nn.Linear(3))


@pytest.mark.parametrize("choice", [dtypes.mixed_bfloat16, dtypes.mixed_float16])
def test_weights_and_gradients_stay_wide(choice):
    mixed = choice(MODEL)
    trainables, state = mixed.init(RNG, X)
    jax.tree.map(np.testing.assert_array_equal, trainables, MODEL.init(RNG, X)[0])
    y, _ = mixed.fwd(X, trainables, state)
    grads = jax.grad(lambda trainables: mixed.fwd(X, trainables, state)[0].sum())(trainables)
    assert y.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(y, MODEL.fwd(X, trainables, state)[0], atol=0.1)


def test_only_norms_and_the_boundary_leave_the_narrow_dtype():
    mixed = dtypes.mixed_bfloat16(MODEL)
    trainables, state = mixed.init(RNG, X)
    violations = dtypes.audit(mixed.fwd, X, trainables, state, dtype="bfloat16")
    assert {violation.path for violation in violations} == {"block/stacked/norm", ""}
    boundary = [violation for violation in violations if violation.path == ""]
    assert [(violation.primitive, violation.outputs) for violation in boundary] == [
        ("convert_element_type", ("float32",))
    ]


def test_float32_statistics_are_more_accurate():
    x = normal(64, 512, mean=100.0, dtype="bfloat16")
    exact = np.asarray(x, np.float64)
    exact = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)

    def error(norm):
        trainables, _ = norm.init(RNG, x)
        return np.abs(np.asarray(norm.fwd(x, trainables)[0], np.float64) - exact).max()

    assert error(nn.LayerNorm(accum_dtype="float32")) < 0.5 * error(nn.LayerNorm())


@pytest.mark.parametrize("choice", [dtypes.mixed_bfloat16, dtypes.mixed_float16])
def test_a_plain_function_is_an_error_that_suggests_mlax_f(choice):
    with pytest.raises(TypeError, match=r"model is the function relu, which is not a layer; wrap it: mlax.F\(relu\)\."):
        choice(jax.nn.relu)


def test_integers_pass_through():
    model = dtypes.Mixed(mlax.Series(nn.Embed(10, 4), nn.Linear(2)))
    x = jnp.arange(6).reshape(2, 3)
    trainables, _ = model.init(RNG, x)
    assert model.fwd(x, trainables)[0].dtype == jnp.float32


def test_an_embedding_in_another_param_dtype_follows_its_table():
    embed = nn.Embed(10, 4, param_dtype="bfloat16")
    trainables, _ = embed.init(RNG, jnp.arange(3))
    assert embed.fwd(jnp.arange(3), trainables)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("layer", [nn.Linear(3), nn.Bias(), nn.Scaler(), nn.LayerNorm()], ids=repr)
def test_param_dtype_stores_wide_weights_for_narrow_computation(layer):
    wide = mlax.override(layer, type(layer), param_dtype="float32")
    x = X.astype(jnp.bfloat16)
    trainables, _ = wide.init(RNG, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(trainables)} == {jnp.dtype("float32")}
    assert wide.fwd(x, trainables)[0].dtype == jnp.bfloat16
    assert dtypes.audit(wide.fwd, x, trainables, dtype="bfloat16") == ()


def test_accum_dtype_of_a_product_is_declared_and_visible():
    layer = nn.Linear(3, accum_dtype="float32")
    x = X.astype(jnp.bfloat16)
    trainables, _ = layer.init(RNG, x)
    assert layer.fwd(x, trainables)[0].dtype == jnp.bfloat16
    assert "dot_general" in {violation.primitive for violation in dtypes.audit(layer.fwd, x, trainables)}


def test_an_upcast_deep_in_a_scanned_rematerialized_block_is_found():
    def leak(x):
        return (x.astype(jnp.float32) * 2).astype(x.dtype)

    inner = mlax.Series(norm=nn.LayerNorm(), deep=mlax.Series(up=nn.Linear(6), leak=mlax.F(leak)))
    model = mlax.Series(stem=nn.Linear(6), blocks=mlax.Repeat(mlax.Residual(inner), 3, mode="remat"))
    x = X.astype(jnp.bfloat16)
    trainables, state = model.init(RNG, x)
    violations = dtypes.audit(model.fwd, x, trainables, state)
    assert {violation.path for violation in violations} == {"blocks/stacked/layer/deep/leak"}
    assert {violation.source.split(":")[0] for violation in violations} == {"test_mixed.py"}
    backward = dtypes.audit(jax.grad(lambda t: jax.lax.reduce_sum(model.fwd(x, t, state)[0], (0, 1))), trainables)
    assert {violation.path for violation in backward} == {"blocks/stacked/layer/deep/leak"}
    with pytest.raises(dtypes.DtypeError, match="blocks/stacked/layer/deep/leak"):
        dtypes.check(model.fwd, x, trainables, state)
