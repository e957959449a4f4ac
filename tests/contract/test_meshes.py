"""A layer takes arrays that lie on a mesh. Types tell whether it does, so everything here is traced and nothing run."""

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def loss(layer, x, trainables, non_trainables, rng):
    y, _ = layer.fwd(x, trainables, non_trainables, rng=rng)
    return sum(leaf.sum(dtype=leaf.dtype) for leaf in jax.tree.leaves(y))


def like(tree, sharding):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def test_arrays_may_lie_on_a_mesh_that_is_not_set(row):
    layer, x, trainables, non_trainables = row.init("float32")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    arguments = like((trainables, x, non_trainables, jax.random.key(1)), NamedSharding(mesh, P()))
    gradient = jax.grad(lambda trainables, x, *rest: loss(layer, x, trainables, *rest), 0)
    jax.jit(gradient).trace(*arguments)
