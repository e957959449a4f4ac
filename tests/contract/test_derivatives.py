"""Every layer has derivatives of every order, in forward and reverse mode, in float32, mixed precision and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import dtypes
from mlax._jax import to_device
from tests.asserts import assert_close

H = 1e-6  # of finite differences


def weighted_sum(layer, non_trainables, x):
    """The output of a layer, multiplied by fixed random weights and summed: a function of (trainables, input)."""

    def function(trainables, own_x=x):
        y, _ = layer.fwd(own_x, trainables, non_trainables, rng=jax.random.key(1))
        return tree_dot(normal_like(y, 1), y)

    return function


def derivatives(function, place, direction):
    """The value, the gradient, the slope by forward mode, and the Hessian's product with the direction, two ways."""
    value, gradient = jax.value_and_grad(function, range(len(place)))(*place)
    _, slope = jax.jvp(function, place, direction)

    def grad(*place):
        return jax.grad(function, range(len(place)))(*place)

    _, forward_over_reverse = jax.jvp(grad, place, direction)
    reverse_over_reverse = jax.grad(lambda place: tree_dot(grad(*place), direction))(place)
    return value, gradient, slope, forward_over_reverse, reverse_over_reverse


def test_derivatives_of_first_and_second_order_agree_with_finite_differences(row):
    with jax.enable_x64(True):
        layer, x, trainables, non_trainables = row.init("float64")
        place = (to_device(trainables),) if row.integers else (to_device(trainables), x)
        direction = normal_like(place, 0)
        function = weighted_sum(layer, non_trainables, x)
        run = jax.jit(lambda *place: derivatives(function, place, direction))
        _, gradient, slope, product, other_product = run(*place)
        ahead, behind = (
            run(*jax.tree.map(lambda leaf, step: leaf + sign * H * step, place, direction)) for sign in (1, -1)
        )
        assert_close(tree_dot(gradient, direction), slope, 1e-10)
        assert_close(slope, (ahead[0] - behind[0]) / (2 * H), 1e-6)
        assert_close(other_product, product, 1e-10)
        assert_close(product, jax.tree.map(lambda a, b: (a - b) / (2 * H), ahead[1], behind[1]), 1e-6)


@pytest.mark.every_row
@pytest.mark.parametrize("precision", ["float32", "mixed"])
def test_derivatives_of_first_and_second_order_can_be_traced(row, precision):
    layer, x, trainables, non_trainables = row.init("float32")
    if precision == "mixed":
        layer = dtypes.mixed_bfloat16(layer)
    place = (trainables,) if row.integers else (trainables, x)
    function = weighted_sum(layer, non_trainables, x)
    found = jax.eval_shape(lambda *place: derivatives(function, place, jax.tree.map(jnp.ones_like, place)), *place)
    assert jax.tree.map(jnp.shape, found[-1]) == jax.tree.map(jnp.shape, place)


def normal_like(tree, seed):
    """Random values in the shapes and dtypes of a pytree."""
    draws = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: draws.normal(size=leaf.shape).astype(leaf.dtype), tree)


def tree_dot(a, b):
    """The dot product of two pytrees."""
    return sum(
        jnp.sum(one * other, dtype=other.dtype) for one, other in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )
