"""Packing: a pytree in a few vectors, with the same values and the same steps."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import optim
from tests.asserts import assert_close, assert_raises, compilations, unequal_leaves
from tests.catalogue.optimizers import loss, tree

MIXED = {**tree("float32"), "half": {"kernel": jnp.ones((3, 2), jnp.bfloat16), "bias": jnp.zeros(2, jnp.bfloat16)}}
DECAYED = ("decayed", "**/kernel")
EPS = float(jnp.finfo(jnp.float32).eps)


@pytest.mark.parametrize("groups", [(), (DECAYED,), (("heat", "temperature"), DECAYED)])
@pytest.mark.parametrize("trainables", [tree("float32"), MIXED, {"x": jnp.zeros((0, 3)), "y": jnp.ones(())}])
def test_unpack_inverts_pack(trainables, groups):
    if groups and "x" in trainables:
        groups = (("group", "x"),)
    packing = optim.Packing.of(trainables, *groups)
    packed = packing.pack(trainables)
    assert all(leaf.ndim == 1 for leaf in jax.tree.leaves(packed))
    assert not unequal_leaves(packing.unpack(packed), trainables)
    assert not unequal_leaves(jax.jit(packing.unpack)(jax.jit(packing.pack)(trainables)), trainables)
    assert not unequal_leaves(packing.pack(packing.unpack(packed)), packed)


def test_each_dtype_and_group_has_one_vector():
    assert set(optim.Packing.of(MIXED).pack(MIXED)) == {"float32", "bfloat16"}
    packed = optim.Packing.of(MIXED, DECAYED).pack(MIXED)
    assert {name: set(vectors) for name, vectors in packed.items()} == {
        "decayed": {"float32", "bfloat16"},
        "rest": {"float32", "bfloat16"},
    }
    assert packed["decayed"]["float32"].shape == (8 * 4 + 2 * 4 * 8,)


def test_pytrees_of_lists_and_tuples_are_packed():
    trainables = [jnp.ones(3), (jnp.zeros((2, 2)), {"kernel": jnp.ones(1)})]
    packing = optim.Packing.of(trainables)
    assert not unequal_leaves(packing.unpack(packing.pack(trainables)), trainables)


def test_shapes_and_dtypes_are_enough_for_a_packing():
    trainables = tree("float32")
    assert optim.Packing.of(jax.eval_shape(lambda: tree("float32"))) == optim.Packing.of(trainables)


def test_equal_packings_are_equal_and_hash_equal():
    one, two = (optim.Packing.of(tree("float32", seed), DECAYED) for seed in (0, 1))
    assert one == two and hash(one) == hash(two) and one != optim.Packing.of(tree("float32"))
    unpack = jax.jit(lambda packing, packed: packing.unpack(packed), static_argnums=0)
    packed = one.pack(tree("float32"))
    unpack(one, packed)
    with compilations() as found:
        unpack(two, packed)
    assert not found


def test_the_gradient_through_unpack_is_the_packed_gradient():
    trainables = tree("float32")
    packing = optim.Packing.of(trainables, DECAYED)
    packed = packing.pack(trainables)
    assert not unequal_leaves(
        jax.grad(lambda packed: loss(packing.unpack(packed)))(packed), packing.pack(jax.grad(loss)(trainables))
    )


def test_the_gradient_is_one_concatenation_and_not_a_sum_of_padded_parts():
    trainables = tree("float32")
    packing = optim.Packing.of(trainables)
    packed = packing.pack(trainables)

    def once(packed):  # each leaf: one that is used twice has its own sum
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(packing.unpack(packed)))

    written = str(jax.make_jaxpr(jax.grad(once))(packed))
    assert written.count(" concatenate[") == 1
    assert " pad[" not in written and "add_any" not in written


@pytest.mark.parametrize(
    "optimizer", [optim.SGD(0.1, momentum=0.9), optim.Adam(0.1), optim.Lion(0.01), optim.RMSProp(0.01)], ids=repr
)
def test_elementwise_optimizers_take_the_same_steps(optimizer):
    plain = tree("float32")
    packing = optim.Packing.of(plain)
    packed, update = packing.pack(plain), jax.jit(optimizer.update)
    state, packed_state = optimizer.init(plain), optimizer.init(packed)
    for seed in range(
        1, 21
    ):  # gradients are given: fused with what computes them, multiplication and sum may round once
        grads = tree("float32", seed)
        plain, state = update(grads, state, plain)
        packed, packed_state = update(packing.pack(grads), packed_state, packed)
    assert_same_steps(packing.unpack(packed), plain)
    for name in state._fields[1:]:
        assert_same_steps(packing.unpack(getattr(packed_state, name)), getattr(state, name))


def assert_same_steps(found, wanted):
    """Vectors and matrices are bitwise equal; a scalar, whose update XLA may fuse otherwise, within an ulp a step."""
    scalars = found.pop("temperature"), wanted["temperature"]
    np.testing.assert_allclose(*scalars, rtol=20 * EPS, atol=20 * EPS)
    assert not unequal_leaves(found, {name: leaf for name, leaf in wanted.items() if name != "temperature"})


def test_a_group_of_decayed_leaves_decays_as_the_leaves_would():
    plain, grads = tree("float32"), tree("float32", 1)
    packing = optim.Packing.of(plain, DECAYED)
    packed, packed_grads = packing.pack(plain), packing.pack(grads)
    one, two = optim.AdamW(0.1, decay=0.5), optim.AdamW(0.1, decay=0.5, decayed=("decayed/**",))
    new, _ = one.update(grads, one.init(plain), plain)
    new_packed, _ = two.update(packed_grads, two.init(packed), packed)
    assert_close(packing.unpack(new_packed), new, 1e-6, 0)


def test_a_packing_survives_pickling():
    packing = optim.Packing.of(tree("float32"), DECAYED)
    assert pickle.loads(pickle.dumps(packing)) == packing


def broken(**change):
    return {**tree("float32"), **change}


PACKING = optim.Packing.of(tree("float32"))
MISTAKES = {
    "a leaf is missing": (
        lambda: PACKING.pack({"temperature": jnp.ones(())}),
        ValueError,
        ["dense/bias", "float32[4]"],
    ),
    "a leaf of another shape": (
        lambda: PACKING.pack(broken(temperature=jnp.ones(2))),
        ValueError,
        ["temperature", "float32[]", "float32[2]"],
    ),
    "a leaf of another dtype": (
        lambda: PACKING.pack(broken(temperature=jnp.ones((), jnp.float16))),
        ValueError,
        ["temperature", "float32[]", "float16[]"],
    ),
    "a leaf too many": (lambda: PACKING.pack(broken(extra=jnp.ones(2))), ValueError, ["also", "extra"]),
    "a vector is missing": (lambda: PACKING.unpack({}), ValueError, ["the vector 'float32' is missing", "`pack`"]),
    "a vector of another length": (
        lambda: PACKING.unpack({"float32": jnp.ones(7)}),
        ValueError,
        ["'float32'", "float32[7]", "101 elements"],
    ),
    "a group that matches nothing": (
        lambda: optim.Packing.of(tree("float32"), ("group", "nothing/*")),
        KeyError,
        ["nothing/*", "matches nothing"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_say_what_was_passed_and_what_is_needed(mistake):
    assert_raises(*MISTAKES[mistake])
