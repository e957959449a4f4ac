"""Convolutions on a mesh compute what one device does, whichever axes of the images are sharded."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mlax import ops
from tests.asserts import assert_close

X = (8, 8, 8, 4)
CASES = {
    "conv": (ops.conv, (16, 3, 3, 4), {}),
    "strided": (ops.conv, (8, 3, 3, 4), {"strides": 2}),
    "dilated": (ops.conv, (8, 3, 3, 4), {"dilation": 2}),
    "grouped": (ops.conv, (8, 3, 3, 2), {"groups": 2}),
    "depthwise": (ops.conv, (4, 3, 3, 1), {"groups": 4}),
    "transposed": (ops.conv_transpose, (8, 3, 3, 4), {"strides": 2}),
    "grouped, transposed": (ops.conv_transpose, (8, 3, 3, 2), {"groups": 2}),
}
SPLITS = [P("data"), P(None, "rows"), P("data", "rows"), P(None, "data", "rows"), P("data", "rows", None, "model")]


def case(name):
    """A function to differentiate, and its arguments: the input, the kernel, and the weights of the outputs."""
    function, kernel, options = CASES[name]
    draws = np.random.default_rng(0)
    x, w = (jnp.asarray(draws.normal(size=shape), jnp.float32) for shape in (X, kernel))
    y = jnp.asarray(draws.normal(size=function(x, w, **options).shape), jnp.float32)

    def gradients(x, w, y):
        return jax.value_and_grad(lambda x, w: (function(x, w, **options) * y).mean(), argnums=(0, 1))(x, w)

    return gradients, (x, w, y)


def shard(arguments, split):
    """A mesh, and the arguments on it, sharded by `split`; the kernel replicated."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "rows", "model"), axis_types=(AxisType.Auto,) * 3)
    places = NamedSharding(mesh, split), NamedSharding(mesh, P()), NamedSharding(mesh, split)
    return mesh, jax.device_put(arguments, places)


@pytest.mark.parametrize("is_set", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_those_on_one_device(name, is_set, thorough):
    gradients, arguments = case(name)
    wanted = jax.jit(gradients)(*arguments)
    for split in SPLITS if thorough or name == "conv" else SPLITS[-2:]:
        mesh, there = shard(arguments, split)
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            assert_close(jax.jit(gradients)(*there), wanted, 1e-5, 1e-6, str(split))


@pytest.mark.parametrize("name", ["conv", "grouped", "transposed"])
def test_no_mesh_needs_to_be_set_inside_or_outside_jit(name):
    gradients, arguments = case(name)
    wanted = gradients(*arguments)
    for split in (P(), P("data", "rows")):
        _, there = shard(arguments, split)
        assert_close(gradients(*there), wanted, 1e-5, 1e-6, str(split))
        assert_close(jax.jit(gradients)(*there), wanted, 1e-5, 1e-6, str(split))
