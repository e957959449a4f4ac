"""A part on another device, on a mesh or on the host computes the same, and stays where it was put."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mlax
from mlax import nn, optim, place
from tests.arrays import normal
from tests.asserts import assert_close


def pipeline(first, second):
    """Two halves of a network, each on its own device, as a user would write it."""
    half = mlax.Series(up=nn.Linear(8), act=mlax.F(jnp.tanh), down=nn.Linear(6))
    return mlax.Series(first=place.On(half, first), second=place.On(half, second))


@pytest.fixture(name="x")
def of_inputs():
    return normal(4, 6)


def resident():
    half = mlax.Series(up=nn.Linear(8), act=mlax.F(jnp.tanh), down=nn.Linear(6))
    return mlax.Series(first=half, second=half)


def loss(model, x):
    return lambda trainables: (model.fwd(x, trainables)[0] ** 2).mean()


def test_parts_on_two_devices_train_like_one(x):
    here, there = jax.devices()[1], jax.devices()[2]
    model, whole = pipeline(here, there), resident()
    trainables, _ = model.init(jax.random.key(0), x)
    same, _ = whole.init(jax.random.key(0), x)
    assert_close(trainables, same)
    assert all(leaf.devices() == {here} for leaf in jax.tree.leaves(trainables["first"]))
    assert all(leaf.devices() == {there} for leaf in jax.tree.leaves(trainables["second"]))
    value, grads = jax.value_and_grad(loss(model, x))(trainables)
    assert value.devices() == {there}
    assert_close((value, grads), jax.value_and_grad(loss(whole, x))(same))
    assert all(leaf.devices() == {here} for leaf in jax.tree.leaves(grads["first"]))
    assert all(leaf.devices() == {there} for leaf in jax.tree.leaves(grads["second"]))


def test_each_part_has_its_own_optimizer_state(x):
    model, whole = pipeline(*jax.devices()[1:3]), resident()
    trainables, same = (each.init(jax.random.key(0), x)[0] for each in (model, whole))
    optimizer = optim.ClipNorm(optim.AdamW(optim.Cosine(0.1, 10)), 1.0)
    with pytest.raises(ValueError, match=r"first/.* is on .* and second/.* on .*; use a separate state for each part"):
        optimizer.init(trainables)
    states = {name: optimizer.init(part) for name, part in trainables.items()}
    kept, update = optimizer.init(same), jax.jit(optimizer.update)
    for _ in range(3):
        grads, wanted = jax.grad(loss(model, x))(trainables), jax.grad(loss(whole, x))(same)
        for name, part in grads.items():
            trainables[name], states[name] = update(part, states[name], trainables[name])
        same, kept = update(wanted, kept, same)
    assert_close(trainables, same)


def test_a_part_runs_on_a_mesh_with_a_sharded_input(x):
    mesh = Mesh(np.array(jax.devices()[4:6]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    for where in (mesh, split):
        layer = place.On(nn.Linear(5), where)
        trainables, _ = layer.init(jax.random.key(0), x)
        assert trainables["kernel"].devices() == set(jax.devices()[4:6])
        y, _ = layer.fwd(x, trainables)
        assert y.devices() == set(jax.devices()[4:6])
        assert_close(y, nn.Linear(5).fwd(x, *nn.Linear(5).init(jax.random.key(0), x))[0])
    assert y.sharding.spec[0] == "data"


def test_parts_of_one_jitted_function_cannot_be_on_two_devices(x):
    model = pipeline(jax.devices()[1], jax.devices()[2])
    variables = model.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(model.fwd)(x, *variables)


def test_a_part_on_the_host_computes_there_inside_jit(x):
    model = mlax.Series(first=nn.Linear(8), host=place.On(nn.Linear(8), place.host), last=nn.Linear(6))
    whole = mlax.Series(first=nn.Linear(8), host=nn.Linear(8), last=nn.Linear(6))
    trainables, _ = model.init(jax.random.key(0), x)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(trainables["host"])} == {"pinned_host"}
    same, _ = whole.init(jax.random.key(0), x)
    found = jax.jit(jax.value_and_grad(loss(model, x)))(trainables)
    assert_close(found, jax.jit(jax.value_and_grad(loss(whole, x)))(same))
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(found[1]["host"])} == {"pinned_host"}


def test_an_invalid_placement_is_an_error():
    with pytest.raises(TypeError, match="relu"):
        place.On(jax.nn.relu, jax.devices()[0])
    with pytest.raises(TypeError, match=r"must be a device, a Mesh, a NamedSharding or place.host"):
        place.On(nn.Linear(3), "gpu")
