"""Sums and means in float16 and bfloat16, against float64 and at the limits of their ranges; integers are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mlax
from mlax import nn, ops, optim
from mlax._jax import broadcast_like, global_norm, reduce_mean, reduce_sum, take_rows
from tests.arrays import normal

RNG = jax.random.key(0)
NARROW = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def assert_within_epsilons(found, exact, times):
    """Each element is within `times` epsilons of its dtype of the largest exact one."""
    eps = float(jnp.finfo(found.dtype).eps)
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=0, atol=times * eps * np.abs(exact).max())


@NARROW
@pytest.mark.parametrize(
    "shape, axes",
    [
        pytest.param((8, 32, 32, 1), (0, 1, 2), marks=pytest.mark.thorough),
        pytest.param((3, 300, 7), (1,), marks=pytest.mark.thorough),
        ((1000, 1000), (0, 1)),
        ((2, 100_003), (1,)),
        ((70, 5, 90), (0, 2)),
    ],
)
def test_sums_means_and_gradients_of_broadcasts_are_rounded_once(shape, axes, dtype):
    x = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, shape) / 64, dtype)
    exact = np.asarray(x, np.float64)
    assert_within_epsilons(jax.jit(reduce_sum, static_argnums=1)(x, axes), exact.sum(axes), 1)
    assert_within_epsilons(jax.jit(reduce_mean, static_argnums=1)(x, axes), exact.mean(axes), 1)
    weight = jnp.ones([1 if axis in axes else size for axis, size in enumerate(shape)], dtype)
    (gradient,) = jax.vjp(lambda weight: broadcast_like(weight, x), weight)[1](x)
    assert_within_epsilons(gradient, exact.sum(axes, keepdims=True), 1)


@NARROW
def test_a_mean_does_not_overflow_nor_lose_small_numbers(dtype):
    for size in (3, 1000, 2**20):
        x = jnp.broadcast_to(jnp.asarray([1e-3, 1.0, 60_000.0], dtype), (size, 3))
        assert_within_epsilons(reduce_mean(x, (0,)) / x[0], np.ones(3), 1)


@NARROW
def test_batch_norm_of_ones_is_zero_and_their_mean_one(dtype):
    x = jnp.ones((8, 32, 32, 1), dtype)
    layer = nn.BatchNorm(momentum=1.0)
    y, state = layer.fwd(x, *layer.init(RNG, x))
    np.testing.assert_array_equal(y, jnp.zeros_like(x))
    assert (state["mean"], state["var"]) == (1, 0)


@pytest.mark.parametrize("low, high", [(300, 600), (-3000, 3000)])
def test_batch_norm_in_float16_is_that_of_large_values(low, high):
    x = jnp.asarray(np.random.default_rng(0).uniform(low, high, (16, 8, 8, 4)), "float16")
    layer = nn.BatchNorm(momentum=1.0)
    y, state = layer.fwd(x, *layer.init(RNG, x))
    exact = np.asarray(x, np.float64)
    mean, var = exact.mean((0, 1, 2)), exact.var((0, 1, 2))
    assert_within_epsilons(y, (exact - mean) / np.sqrt(var), 8)
    assert_within_epsilons(state["mean"], mean, 2 + 1000 * (low < 0))
    if high == 600:
        assert_within_epsilons(state["var"], var * 1024 / 1023, 4)
    else:
        assert np.isinf(np.asarray(state["var"])).all()  # beyond float16, and not hidden


@NARROW
def test_global_pooling_of_ones_is_one(dtype):
    ones = jnp.ones((1, 256, 256, 2), dtype)
    np.testing.assert_array_equal(nn.GlobalPool().fwd(ones, None)[0], np.ones((1, 2)))
    half = ones[:, :128] if dtype == "float16" else ones  # 65536 is beyond float16
    total, _ = nn.GlobalPool(by="sum").fwd(half, None)
    np.testing.assert_array_equal(np.asarray(total, np.float64), half.shape[1] * 256)


@NARROW
@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.MeanPool(100), (1, 200, 200, 1)),
        (nn.MeanPool(37, strides=3, padding=5), (1, 80, 80, 1)),
        (nn.MeanPool(3, strides=2, padding="SAME"), (1, 9, 9, 2)),
        (nn.AdaptivePool((3, 7)), (1, 1000, 8, 1)),
        (nn.AdaptivePool(900), (1, 1000, 2)),
    ],
)
def test_mean_pools_of_large_windows_and_large_values_agree_with_float64(layer, shape, dtype):
    run = jax.jit(lambda x: layer.fwd(x, None)[0])
    for scale in (1.0, 60_000.0):
        x = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.0, shape) * scale, dtype)
        assert_within_epsilons(run(x), np.asarray(run(x.astype("float32"))), 4)


@NARROW
def test_the_gradient_of_an_embedding_sums_all_its_uses(dtype):
    indices = jnp.asarray(np.random.default_rng(0).integers(-1, 5, (300, 40)), jnp.int32)  # -1 and 4 are out of bounds
    table, cotangents = jnp.ones((4, 3), dtype), jnp.full((300, 40, 3), 2.0**-6, dtype)
    gradient = jax.vjp(lambda table: ops.embedding(indices, table), table)[1](cotangents)[0]
    counts = [(np.asarray(indices) == row).sum() for row in range(4)]
    assert_within_epsilons(gradient, np.repeat(counts, 3).reshape(4, 3) * 2.0**-6, 2)


@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_rows_of_a_narrow_table_have_the_derivatives_of_a_wide_one(mode):
    indices = jnp.asarray([[0, 2, 2], [5, 1, 2]], jnp.uint8)

    def square(table):
        return reduce_sum(jnp.nan_to_num(take_rows(table, indices, mode)) ** 2, (0, 1, 2))

    @jax.jit
    def derivatives(table):
        return jax.vmap(jax.grad(square))(jnp.stack([table, 2 * table])), jax.jacfwd(jax.grad(square))(table)

    narrow, wide = (derivatives(jnp.arange(8.0).reshape(4, 2).astype(dtype)) for dtype in ("bfloat16", "float32"))
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one.astype("float32"), other), narrow, wide)


@NARROW
def test_softmax_over_many_elements_sums_to_one_and_has_the_gradient_of_float64(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5000)), dtype)
    g = jnp.asarray(np.random.default_rng(1).uniform(size=(2, 5000)), dtype)
    y, gradient = jax.vjp(ops.softmax, x)
    exact = np.exp(np.asarray(x, np.float64))
    exact /= exact.sum(-1, keepdims=True)
    assert_within_epsilons(y, exact, 2)
    g64 = np.asarray(g, np.float64)
    assert_within_epsilons(gradient(g)[0], exact * (g64 - (exact * g64).sum(-1, keepdims=True)), 8)


@NARROW
def test_norms_of_gradients_over_a_million_elements_agree_with_float64(dtype):
    leaves = {"kernel": jnp.full((1000, 1000), 0.25, dtype), "bias": jnp.full(5000, 200.0, dtype)}
    exact = np.sqrt(1e6 * 0.0625 + 5000 * 200.0**2)
    np.testing.assert_allclose(np.asarray(global_norm(leaves), np.float64), exact, rtol=1e-6)


@NARROW
@pytest.mark.parametrize("wrap", [optim.LARS, optim.LAMB], ids=str)
def test_trust_ratios_in_a_narrow_dtype_are_those_of_float32(wrap, dtype):
    w = {"kernel": jnp.asarray(np.random.default_rng(0).uniform(100, 300, (8, 32, 32)), dtype)}
    g = {"kernel": jnp.asarray(np.random.default_rng(1).uniform(0.5, 1, (8, 32, 32)), dtype)}
    found, wanted = (wrap(0.1, accum_dtype=accum_dtype) for accum_dtype in (dtype, "float32"))
    (found, _), (wanted, _) = (jax.jit(each.update)(g, each.init(w), w) for each in (found, wanted))
    assert_within_epsilons(found["kernel"], np.asarray(wanted["kernel"], np.float64), 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sums_over_a_sharded_batch_are_those_of_one_device(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    layer = mlax.Series(nn.BatchNorm(), nn.Linear(4), jnp.tanh, nn.GlobalPool())
    x = normal(8, 16, 16, 6, mean=1.0, dtype="bfloat16")
    variables = layer.init(RNG, x)

    @jax.jit
    def gradients(x, trainables, state):
        def total(trainables, x):
            y, _ = layer.fwd(x, trainables, state)
            return reduce_sum(y * y, (0, 1))

        return jax.grad(total, (0, 1))(trainables, x)

    wanted = gradients(x, *variables)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P("data", None, "model")))
        found = gradients(sharded, *jax.device_put(variables, NamedSharding(mesh, P())))
    jax.tree.map(lambda one, other: assert_within_epsilons(one, np.asarray(other, np.float64), 16), found, wanted)


def test_wide_sums_are_those_of_jax():
    for dtype in ("float32", "int32"):
        x = jnp.ones((4, 6), dtype)
        assert "dot_general" not in str(jax.make_jaxpr(lambda x: reduce_sum(x, (0,)))(x))
        assert broadcast_like(x[:1], x).shape == (1, 6)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool(2),
        nn.MeanPool(2),
        nn.SumPool(2),
        nn.Pool(jnp.minimum, 255.0, 2),
        nn.GlobalPool(),
        nn.GlobalPool(by="max"),
        nn.GlobalPool(by="sum"),
        nn.AdaptivePool(2),
        nn.AdaptivePool(2, by="max"),
        nn.BatchNorm(scale=False, shift=False),
        nn.BatchNorm(param_dtype="float32"),
        nn.LayerNorm(param_dtype="float32"),
        nn.RMSNorm(scale=False),
        nn.GroupNorm(1, scale=False, shift=False),
        nn.InstanceNorm(param_dtype="float32"),
    ],
    ids=str,
)
def test_pools_and_norms_refuse_integers(layer, dtype):
    x = jnp.ones((2, 4, 4, 3), dtype)
    with pytest.raises(TypeError, match=rf"{dtype}.*floating"):
        layer.init(RNG, x)
    variables = layer.init(RNG, x.astype("float32"))
    with pytest.raises(TypeError, match=rf"{dtype}.*floating"):
        layer.fwd(x, *variables)


def test_integers_are_refused_in_a_series_by_the_name_of_the_layer():
    with pytest.raises(TypeError, match=r"GlobalPool.*uint8.*x\.astype"):
        mlax.Series(nn.GlobalPool()).init(RNG, jnp.full((1, 4, 4, 1), 200, "uint8"))
