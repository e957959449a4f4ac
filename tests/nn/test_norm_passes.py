"""The forward and backward passes of the norms: what they keep, and their precision on each backend."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import nn, ops
from tests.arrays import normal
from tests.asserts import assert_close_to_scale

RNG = jax.random.key(0)
NORMS = {
    "layer": nn.LayerNorm(accum_dtype="float32"),
    "layer two axes": nn.LayerNorm(axes=(-2, -1), accum_dtype="float32"),
    "rms": nn.RMSNorm(accum_dtype="float32"),
    "batch": nn.BatchNorm(accum_dtype="float32"),
    "group": nn.GroupNorm(2, accum_dtype="float32"),
    "group, channels first": nn.GroupNorm(2, axis=1, accum_dtype="float32"),
    "instance": nn.InstanceNorm(accum_dtype="float32"),
}


@pytest.fixture(params=["cpu", "gpu"])
def backend(request, monkeypatch):
    """What each backend computes, on the CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: request.param)


@pytest.mark.parametrize("layer", NORMS.values(), ids=NORMS)
def test_the_backward_pass_of_a_norm_keeps_x_and_statistics_only(layer, backend):
    x = jax.ShapeDtypeStruct((4, 6, 6, 8), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, RNG, x)

    def residuals(x, trainables, state):
        return jax.vjp(lambda x, trainables: layer.fwd(x, trainables, state)[0], x, trainables)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, x, *variables))
    large = [(leaf.dtype, leaf.shape) for leaf in kept if leaf.size >= x.size]
    assert large == [(x.dtype, x.shape)]


@pytest.mark.parametrize("layer", NORMS.values(), ids=NORMS)
def test_gradients_of_norms_are_those_of_float64_on_each_backend(layer, backend):
    x, dy = 3.0 + 2.0 * normal(4, 6, 3, 6, seed=1), normal(4, 6, 3, 6, seed=2)
    trainables, state = layer.init(RNG, x)
    trainables = jax.tree.map(lambda leaf: leaf + 0.3 * normal(*leaf.shape, seed=3), trainables)

    def gradients(layer, x, trainables, state, dy):
        return jax.vjp(lambda x, trainables: layer.fwd(x, trainables, state)[0], x, trainables)[1](dy)

    found = jax.jit(gradients, static_argnums=0)(layer, x, trainables, state, dy)
    with jax.enable_x64(True):
        layer, wide = ops_by_definition(layer), jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (x, trainables))
        wanted = jax.jit(lambda x, w, dy: jax.vjp(layer, x, w)[1](dy))(*wide, np.asarray(dy, np.float64))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)


def ops_by_definition(layer):
    """The norm as a function of x and its weights, whose derivative is JAX's own."""

    def normalize(x, trainables):
        axis = getattr(layer, "axis", -1) % x.ndim
        groups = getattr(layer, "groups", x.shape[axis])
        split = x.reshape(*x.shape[:axis], groups, -1, *x.shape[axis + 1 :])
        if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
            split, axes = x, layer.axes
        else:
            first = 0 if isinstance(layer, nn.BatchNorm) else 1
            axes = tuple(each for each in range(first, split.ndim) if each != axis)
        center = 0.0 if isinstance(layer, nn.RMSNorm) else split.mean(axes, keepdims=True)
        square = jnp.square(split - center).mean(axes, keepdims=True)
        y = ((split - center) / jnp.sqrt(square + layer.eps)).reshape(x.shape)
        weights = {name: leaf.reshape(-1, *(1,) * (x.ndim - axis - 1)) for name, leaf in trainables.items()}
        weights = trainables if isinstance(layer, nn.LayerNorm | nn.RMSNorm) else weights
        return y * weights["scale"] + weights.get("shift", 0.0)

    return normalize


@pytest.mark.parametrize("offset", [0.0, 3.0, 1e3, 1e5])
def test_statistics_in_one_pass_lose_no_digits_to_a_large_mean(offset, backend):
    x = np.asarray(normal(8, 7, 5, seed=1)) + np.float32(offset)
    x[:, :, 0] = offset  # a constant channel
    mean, var, count = jax.jit(lambda x: ops.batch_statistics(x))(x)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(mean, wide.mean((0, 1)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(var, wide.var((0, 1)), rtol=1e-4, atol=1e-6 if offset < 10 else 1e-3)
    assert count == 56


def test_statistics_of_a_batch_have_derivatives(backend):
    x = normal(6, 4, 3, seed=1)
    by_mean, by_var = (jax.grad(lambda x, at=at: ops.batch_statistics(x)[at].sum())(x) for at in (0, 1))
    np.testing.assert_allclose(by_mean, np.full(x.shape, 1 / 24), rtol=1e-6)
    np.testing.assert_allclose(by_var, (x - x.mean((0, 1))) / 12, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "activation, dtype, is_residual", [(jax.nn.silu, np.float32, True), (jax.nn.relu, jnp.bfloat16, False)]
)
def test_an_activation_inside_of_a_batch_norm_changes_no_derivative(activation, dtype, is_residual, monkeypatch):
    layer = nn.BatchNorm(activation=activation, accum_dtype="float32")
    x, residual = normal(2, 4, 5, 3).astype(dtype), normal(2, 4, 5, 3, seed=1).astype(dtype)
    trainables, state = layer.init(RNG, x[0])
    trainables = jax.tree.map(lambda leaf: leaf + normal(*leaf.shape, seed=2).astype(dtype), trainables)

    def derivatives(x, residual, trainables):
        def loss(x, residual, trainables):
            y, new = layer.fwd((x, residual) if is_residual else x, trainables, state)
            return (y.astype(np.float32) ** 3).sum(), (y, new)

        primals = (x, residual, trainables)
        return jax.jvp(jax.grad(loss, (0, 1, 2), has_aux=True), primals, primals)

    def compute(is_fused):
        monkeypatch.setattr(inspect.getmodule(ops.batch_norm), "prefers_fused_activation", lambda _: is_fused)
        traced = jax.jit(lambda *args: jax.vmap(derivatives, (0, 0, None))(*args)).trace(x, residual, trainables)
        assert ("optimization_barrier" in str(traced.jaxpr)) == is_fused
        return traced.lower().compile()(x, residual, trainables)

    inside, behind = compute(True), compute(False)
    tolerance = 1e-5 if dtype == np.float32 else 0.02
    jax.tree.map(functools.partial(assert_close_to_scale, tolerance=tolerance), inside, behind)
    assert jax.tree.map(lambda leaf: leaf.dtype, inside) == jax.tree.map(lambda leaf: leaf.dtype, behind)


def test_an_activation_inside_of_a_batch_norm_keeps_nothing_but_its_inputs(backend):
    layer, x = nn.BatchNorm(activation=jax.nn.silu), jax.ShapeDtypeStruct((4, 6, 6, 8), jnp.float32)
    variables = jax.eval_shape(layer.init, RNG, x)

    def residuals(x, residual, trainables, state):
        return jax.vjp(lambda x, residual: layer.fwd((x, residual), trainables, state)[0], x, residual)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, x, x, *variables))
    assert sum(leaf.size >= x.size for leaf in kept) == (2 if jax.default_backend() == "gpu" else 4)
