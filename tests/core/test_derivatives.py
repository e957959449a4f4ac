"""Functions whose derivatives have rules of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import mlax
from mlax import nn
from mlax._jax._custom_jvp import with_jvps
from mlax._jax._scan import apply_with_transposed, transpose_kernels

W = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)))
X = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)))


def affine(weights, given):
    x, key = given
    return jnp.tanh(x) @ weights["kernel"] + weights["bias"] + jax.random.normal(key, (5,), x.dtype)


def test_a_rule_is_asked_only_for_what_changes():
    asked = []

    def rule(name, change):
        def change_of(dot, a, b):
            asked.append(name)
            return change(dot, a, b)

        return change_of

    product = with_jvps(lambda a, b: a * b, rule("a", lambda dot, a, b: dot * b), rule("b", lambda dot, a, b: a * dot))
    np.testing.assert_allclose(jax.grad(product)(2.0, 3.0), 3.0)
    assert asked == ["a"]
    np.testing.assert_allclose(jax.grad(product, (0, 1))(2.0, 3.0), (3.0, 2.0))
    np.testing.assert_allclose(jax.hessian(product, (0, 1))(2.0, 3.0), ((0.0, 1.0), (1.0, 0.0)))


@pytest.mark.parametrize("modes", ["fwd", "rev"])
def test_turned_kernels_change_no_derivative(modes):
    weights = {"kernel": W, "bias": jnp.ones(5)}

    def run(weights, x):
        return apply_with_transposed(affine, weights, transpose_kernels(weights), (x, jax.random.key(0)))

    np.testing.assert_allclose(run(weights, X), affine(weights, (X, jax.random.key(0))), rtol=1e-6)
    check_grads(run, (weights, X), order=2, modes=[modes], rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only a CPU reads a turned kernel more slowly")
@pytest.mark.parametrize("cell", [nn.LSTMCell(8), nn.GRUCell(8), nn.RNNCell(8)])
def test_no_step_back_through_time_turns_a_kernel(cell):
    layer, x = mlax.Recurrent(cell), jnp.ones((4, 6, 3))
    trainables, _ = layer.init(jax.random.key(0), x)
    gradient = jax.jit(jax.grad(lambda trainables: jnp.sum(layer.fwd(x, trainables)[0] ** 2)))
    products = [line for line in gradient.lower(trainables).compile().as_text().splitlines() if " dot(" in line]
    assert products and not any("rhs_contracting_dims={1}" in line for line in products)
