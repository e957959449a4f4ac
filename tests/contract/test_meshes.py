"""A layer takes arrays that are sharded over a mesh, whichever type the axes have.

Tracing checks the shardings, so `make test` runs nothing; `make thorough` compares the values.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mlax import nn
from mlax._jax import abstract_key


@pytest.fixture(params=[pytest.param("auto", marks=pytest.mark.thorough), "manual", "explicit"])  # no trace shows auto
def over_devices(request):
    """Shards a function and its arguments over two devices: returns (jitted function, arguments, context to run in)."""

    def shard(function, arguments, specs, out):
        kind = AxisType.Explicit if request.param == "explicit" else AxisType.Auto
        mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
        if request.param == "manual":
            function = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out)
        arguments = jax.device_put(arguments, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
        return (
            jax.jit(function),
            arguments,
            jax.set_mesh(mesh) if kind is AxisType.Explicit else contextlib.nullcontext(),
        )

    return shard


def case(row, **options):
    """The gradient of a layer, its arguments for a batch of two parts, and the specs of its arguments and results."""
    layer, key, one = row.layer("float32"), jax.random.key(0), row.x("float32")
    two = jax.tree.map(lambda *parts: np.concatenate(parts), one, row.x("float32", seed=1))
    each, arguments = (((*layer.init(key, x), x)) for x in (one, two))
    specs = jax.tree.map(lambda a, b: P() if a.shape == b.shape else P("data"), each, arguments)

    def loss(trainables, non_trainables, x):
        y, _ = layer.fwd(x, trainables, non_trainables, **options)
        return sum((leaf * leaf).sum(dtype=leaf.dtype) for leaf in jax.tree.leaves(y))

    over = (0,) if row.integers else (0, 2)
    return jax.grad(loss, over), arguments, specs, tuple(specs[place] for place in over)


@pytest.mark.gradients
def test_gradients_can_be_traced_on_a_mesh(row, over_devices):
    function, arguments, mesh = over_devices(*case(row, rng=jax.random.key(1)))
    with mesh:
        function.trace(*arguments)


@pytest.mark.gradients
@pytest.mark.thorough
def test_gradients_on_a_mesh_equal_those_on_one_device(row, over_devices):
    gradient, arguments, *specs = case(row, inference_mode=True)
    function, there, mesh = over_devices(gradient, arguments, *specs)
    with mesh:
        found = function(*there)
    for many, one in zip(*map(jax.tree.leaves, (found, jax.jit(gradient)(*arguments))), strict=True):
        np.testing.assert_allclose(np.asarray(many), one, rtol=1e-4, atol=1e-4)


def test_shapes_cached_on_one_mesh_are_valid_on_another():
    def normed(layer, trainables):
        return jax.jit(lambda x: layer.fwd(x, trainables)[0])

    x, scale, shift = jnp.ones((4, 3)), jnp.ones(3), jnp.zeros(3)
    abstract_key.cache_clear()
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))):
        normed(nn.RMSNorm(), {"scale": scale})(x)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    function = normed(nn.LayerNorm(), {"scale": scale, "shift": shift})
    split = jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_allclose(jax.jit(split)(x), function(x))
