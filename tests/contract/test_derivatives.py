"""Every layer has derivatives of every order, in forward and reverse mode, in float32, mixed precision and float64."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import dtypes
from mlax._jax import to_device
from tests.asserts import assert_close

pytestmark = pytest.mark.gradients
H = 1e-6  # of finite differences


def weighted_sum(layer, non_trainables, x):
    """The output of a layer, multiplied by fixed random weights and summed: a function of (trainables, input)."""

    def function(trainables, own_x=x):
        y, _ = layer.fwd(own_x, trainables, non_trainables, rng=jax.random.key(1))
        return tree_dot(normal_like(y, 1), y)

    return function


class Derivatives(NamedTuple):
    """A value and its gradient, their slopes in a direction, of which the second is the Hessian's product with it."""

    value: Any
    gradient: Any
    slope: Any
    product: Any


def forward_derivatives(function, place, direction):
    """The Hessian's product as the slope of the gradient."""
    value, slope = jax.jvp(function, place, direction)
    gradient, product = jax.jvp(jax.grad(function, range(len(place))), place, direction)
    return Derivatives(value, gradient, slope, product)


def reverse_derivatives(function, place, direction):
    """The Hessian's product as the gradient of the slope."""

    def slope(place):
        value, gradient = jax.value_and_grad(function, range(len(place)))(*place)
        return tree_dot(gradient, direction), (value, gradient)

    (found, (value, gradient)), product = jax.value_and_grad(slope, has_aux=True)(place)
    return Derivatives(value, gradient, found, product)


def test_derivatives_of_first_and_second_order_agree_with_finite_differences(row, thorough):
    with jax.enable_x64(True):
        layer, x, trainables, non_trainables = row.init("float64")
        place = (to_device(trainables),) if row.integers else (to_device(trainables), x)
        direction = normal_like(place, 0)
        function = weighted_sum(layer, non_trainables, x)
        derive = reverse_derivatives if row.no_forward_mode else forward_derivatives
        run = jax.jit(lambda *given: derive(function, *given))
        here = run(place, direction)
        ahead, behind = (
            run(jax.tree.map(lambda leaf, step: np.asarray(leaf) + sign * H * step, place, direction), direction)
            for sign in (1, -1)
        )
        assert_close(here.slope, tree_dot(*map(to_numpy, (here.gradient, direction))), 1e-10)
        assert_close(here.slope, difference(ahead.value, behind.value), 1e-6)
        if not row.no_second_derivatives:
            assert_close(here.product, jax.tree.map(difference, ahead.gradient, behind.gradient), 1e-6)
        if thorough:  # elsewhere it is only traced, below
            again = jax.jit(lambda *given: reverse_derivatives(function, *given))(place, direction)
            assert_close(again.product, here.product, 1e-9)


@pytest.mark.every_row
@pytest.mark.parametrize("derive", [reverse_derivatives, pytest.param(forward_derivatives, marks=pytest.mark.thorough)])
def test_derivatives_of_first_and_second_order_can_be_traced(row, derive):
    trace_derivatives(row, row.layer("float32"), derive)


@pytest.mark.parametrize("derive", [forward_derivatives, pytest.param(reverse_derivatives, marks=pytest.mark.thorough)])
def test_derivatives_in_mixed_precision_can_be_traced(row, derive):
    trace_derivatives(row, dtypes.mixed_bfloat16(row.layer("float32")), derive)


def trace_derivatives(row, layer, derive):
    if derive is forward_derivatives and row.no_forward_mode:
        pytest.skip(row.no_forward_mode)
    _, x, trainables, non_trainables = row.init("float32")
    place = (to_device(trainables),) if row.integers else (to_device(trainables), x)
    function = weighted_sum(layer, non_trainables, x)
    found = jax.eval_shape(lambda *place: derive(function, place, place), *place)
    assert jax.tree.map(jnp.shape, found.product) == jax.tree.map(jnp.shape, place)


def normal_like(tree, seed):
    """Random values in the shapes and dtypes of a pytree."""
    draws = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: draws.normal(size=leaf.shape).astype(leaf.dtype), tree)


def tree_dot(a, b):
    """The dot product of two pytrees."""
    return sum((one * other).sum(dtype=other.dtype) for one, other in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def difference(ahead, behind):
    return (np.asarray(ahead) - np.asarray(behind)) / (2 * H)


def to_numpy(tree):
    return jax.tree.map(np.asarray, tree)
