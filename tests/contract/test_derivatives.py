"""Every layer has derivatives of every order, in forward and reverse mode, in float32, mixed precision and float64."""

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


def forward_derivatives(function, place, direction):
    """The slope in a direction, and the Hessian's product with it, as the slope of the gradient."""
    _, slope = jax.jvp(function, place, direction)
    _, product = jax.jvp(jax.grad(function, range(len(place))), place, direction)
    return slope, product


def reverse_derivatives(function, place, direction):
    """The slope in a direction, and the Hessian's product with it, as the gradient of the slope."""

    def slope(place):
        return tree_dot(jax.grad(function, range(len(place)))(*place), direction)

    return jax.value_and_grad(slope)(place)


def test_derivatives_of_first_and_second_order_agree_with_finite_differences(row, thorough):
    with jax.enable_x64(True):
        layer, x, trainables, non_trainables = row.init("float64")
        place = (to_device(trainables),) if row.integers else (to_device(trainables), x)
        direction = jax.tree.map(jnp.asarray, normal_like(place, 0))
        function = weighted_sum(layer, non_trainables, x)
        derive = reverse_derivatives if row.no_forward_mode else forward_derivatives
        run = jax.jit(
            lambda *given: (jax.value_and_grad(function, range(len(place)))(*given[0]), derive(function, *given))
        )
        (_, gradient), (slope, product) = run(place, direction)
        ahead, behind = (
            run(jax.tree.map(lambda leaf, step: leaf + sign * H * step, place, direction), direction)[0]
            for sign in (1, -1)
        )
        assert_close(slope, tree_dot(gradient, direction), 1e-10)
        assert_close(slope, (ahead[0] - behind[0]) / (2 * H), 1e-6)
        if not row.no_second_derivatives:
            assert_close(product, jax.tree.map(lambda a, b: (a - b) / (2 * H), ahead[1], behind[1]), 1e-6)
        if thorough:  # elsewhere it is only traced, below
            assert_close(
                jax.jit(lambda *given: reverse_derivatives(function, *given)[1])(place, direction), product, 1e-9
            )


@pytest.mark.every_row
@pytest.mark.parametrize(
    ("precision", "derive"),
    [
        ("float32", reverse_derivatives),
        ("mixed", forward_derivatives),
        pytest.param("float32", forward_derivatives, marks=pytest.mark.thorough),
        pytest.param("mixed", reverse_derivatives, marks=pytest.mark.thorough),
    ],
)
def test_derivatives_of_first_and_second_order_can_be_traced(row, precision, derive):
    if derive is forward_derivatives and row.no_forward_mode:
        pytest.skip(row.no_forward_mode)
    layer, x, trainables, non_trainables = row.init("float32")
    if precision == "mixed":
        layer = dtypes.mixed_bfloat16(layer)
    place = (to_device(trainables),) if row.integers else (to_device(trainables), x)
    function = weighted_sum(layer, non_trainables, x)
    _, product = jax.eval_shape(lambda *place: derive(function, place, place), *place)
    assert jax.tree.map(jnp.shape, product) == jax.tree.map(jnp.shape, place)


def normal_like(tree, seed):
    """Random values in the shapes and dtypes of a pytree."""
    draws = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: draws.normal(size=leaf.shape).astype(leaf.dtype), tree)


def tree_dot(a, b):
    """The dot product of two pytrees."""
    return sum(
        jnp.sum(one * other, dtype=other.dtype) for one, other in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )
