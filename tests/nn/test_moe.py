"""Mixture of experts, beyond the contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mlax
from mlax import dtypes, nn, ops
from mlax.ops import expert_capacity, expert_slots
from tests.arrays import normal
from tests.asserts import assert_close
from tests.catalogue.experts import linear_expert, moe
from tests.layers import Block
from tests.references.experts import assert_agrees_with_torch

RNG = jax.random.key(0)


def flat(trainables):
    return {path: np.asarray(mlax.get(trainables, path), np.float64) for path in mlax.paths(trainables)}


@pytest.mark.parametrize(("case", "k", "factor"), [("moe 1 2", 1, 1.0), ("moe 2 3", 2, 0.75), ("moe 3 8", 3, 1.3)])
def test_outputs_losses_and_gradients_agree_with_torch(case, k, factor):
    assert_agrees_with_torch(case, nn.MoE(nn.Linear(5), 4, k=k, capacity_factor=factor))


def test_without_a_capacity_no_token_is_dropped_and_torch_agrees():
    assert_agrees_with_torch("moe 3 8", nn.MoE(nn.Linear(5), 4, k=3, capacity_factor=None))


@settings(max_examples=6, deadline=None)
@given(
    sizes=st.sampled_from([(0, 3, 4), (2, 1, 1), (3, 7, 5)]),
    choice=st.sampled_from([(1, 1), (4, 1), (5, 5), (3, 2)]),
    factor=st.sampled_from([0.3, 1.0, 4.0, None]),
    renormalize=st.booleans(),
)
def test_any_sizes_agree_with_a_loop_over_tokens(sizes, choice, factor, renormalize):
    experts, k = choice
    layer = nn.MoE(nn.Linear(3), experts, k=k, capacity_factor=factor, renormalize=renormalize)
    x = normal(*sizes)
    trainables, _ = layer.init(RNG, x)
    (y, losses), _ = jax.jit(layer.fwd)(x, trainables)
    assert y.shape == (*sizes[:-1], 3) and losses["balance"].shape == losses["z"].shape == sizes[:1]
    if sizes[0]:
        w = flat(trainables)
        capacity = sizes[1] if factor is None else expert_capacity(sizes[1], experts, k, factor)
        want = moe(np.asarray(x, np.float64), w["router/kernel"], linear_expert(w), k, capacity, renormalize)
        assert_close((y, losses), want, 2e-5)


def test_capacity_for_all_tokens_equals_no_capacity():
    x = normal(2, 9, 6)
    limited, unlimited = (nn.MoE(nn.MLP((8, 6)), 3, k=2, capacity_factor=factor) for factor in (3.0, None))
    trainables, _ = limited.init(RNG, x)
    a, b = (jax.jit(layer.fwd)(x, trainables)[0] for layer in (limited, unlimited))
    assert_close(a, b, 1e-5, 1e-6)


def test_the_number_of_tokens_may_be_symbolic_in_an_export():
    layer = nn.MoE(nn.Linear(3), 4, k=1)
    x = jax.ShapeDtypeStruct(export.symbolic_shape("b, t, 5"), jnp.float32)
    trainables, _ = layer.init(RNG, jnp.ones((1, 1, 5)))
    fwd = jax.jit(lambda x: layer.fwd(x, trainables)[0])
    exported = export.export(fwd)(x)
    for length in (1, 6, 9):
        assert_close(exported.call(normal(2, length, 5)), fwd(normal(2, length, 5)), 1e-6)


def test_no_token_depends_on_a_later_one():
    x = normal(1, 12, 6)
    layer = nn.MoE(nn.Linear(4), 3, k=2, capacity_factor=0.5)
    trainables, _ = layer.init(RNG, x)
    fwd = jax.jit(layer.fwd)
    (before, _), _ = fwd(x, trainables)
    (after, _), _ = fwd(np.concatenate([x[:, :7], 9 - x[:, 7:]], 1), trainables)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert not np.allclose(before[:, 7:], after[:, 7:])


def test_dropped_tokens_get_zeros_and_the_first_ones_are_kept():
    expert = jnp.zeros((1, 5, 1), jnp.int32)  # all choose expert 0, whose capacity is 2
    place = expert_slots(expert, 3, 2)
    assert place[0, :, 0].tolist() == [0, 1, 6, 6, 6]
    x = normal(1, 5, 4)
    sent = ops.dispatch(x, place, 6)
    np.testing.assert_array_equal(sent[0, :2], x[0, :2])
    np.testing.assert_array_equal(sent[0, 2:], 0)
    back = ops.combine(sent, place, jnp.full((1, 5, 1), 0.5))
    np.testing.assert_array_equal(back[0, :2], x[0, :2] / 2)
    np.testing.assert_array_equal(back[0, 2:], 0)


def test_the_balance_loss_is_one_for_uniform_routing_and_the_number_of_experts_for_one_expert():
    even = ops.route(30.0 * jnp.tile(jnp.eye(4), (1, 3, 1)), 1)
    np.testing.assert_allclose(even.balance, 1.0, rtol=1e-5)
    one = ops.route(30.0 * jnp.broadcast_to(jnp.eye(4)[2], (1, 12, 4)), 1)
    np.testing.assert_allclose(one.balance, 4.0, rtol=1e-5)
    np.testing.assert_allclose(ops.route(jnp.zeros((1, 3, 4)), 1).z, np.log(4) ** 2, rtol=1e-5)


def test_large_logits_stay_finite_in_float16():
    routes = ops.route(jnp.asarray([[[200.0, -200.0, 190.0]]], jnp.float16), 2)
    assert all(jnp.isfinite(leaf).all() for leaf in (routes.gate, routes.balance, routes.z))


def test_training_on_the_balance_loss_balances_the_experts():
    x = normal(4, 32, 6) + 1.0
    layer = nn.MoE(nn.Linear(6), 4, k=1, capacity_factor=None)
    trainables, _ = layer.init(RNG, x)

    @jax.jit
    def step(trainables):
        def loss(trainables):
            (_, losses), _ = layer.fwd(x, trainables)
            return losses["balance"].mean()

        value, grads = jax.value_and_grad(loss)(trainables)
        return value, jax.tree.map(lambda w, g: w - 0.3 * g, trainables, grads)

    first, _ = step(trainables)
    for _ in range(60):
        value, trainables = step(trainables)
    assert value < first and value < 1.1


def test_noise_needs_a_key_only_in_training():
    x = normal(2, 5, 6)
    layer = nn.MoE(nn.Linear(4), 3, noise=0.2)
    trainables, _ = layer.init(RNG, x)
    with pytest.raises(ValueError, match=r"noise needs a key; pass rng=") as caught:
        layer.fwd(x, trainables)
    assert "in router, called on float32[2, 5, 6]" in caught.value.__notes__
    fwd = jax.jit(layer.fwd, static_argnames="inference_mode")
    (_, quiet), _ = fwd(x, trainables, inference_mode=True)
    (_, noisy), _ = fwd(x, trainables, rng=jax.random.key(1))
    assert 0 < float(jnp.abs(quiet["z"] - noisy["z"]).max()) < 1


def test_only_the_router_computes_in_accum_dtype():
    x = normal(2, 8, 6, dtype="bfloat16")
    layer = nn.MoE(nn.Linear(4), 3, accum_dtype="float32")
    trainables, _ = layer.init(RNG, x)
    (y, losses), _ = jax.jit(layer.fwd)(x, trainables)
    assert y.dtype == jnp.bfloat16 and losses["balance"].dtype == losses["z"].dtype == jnp.float32
    violations = dtypes.audit(lambda w, x: layer.fwd(x, w)[0][0], trainables, x, dtype="bfloat16")
    assert not [found for found in violations if found.path.startswith("experts")]
    mixed = dtypes.mixed_bfloat16(mlax.Series(moe=nn.MoE(nn.Linear(4), 3)))
    assert mlax.get(mixed, "moe").accum_dtype == mlax.get(mixed, "moe/router").accum_dtype == "float32"


def test_experts_may_have_state_and_keys():
    x = normal(2, 5, 6)
    layer = nn.MoE(Block(6), 3)
    variables = layer.init(RNG, x)
    _, state = jax.jit(layer.fwd)(x, *variables, rng=RNG)
    assert state["experts"]["stacked"]["count"]["calls"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_examples_sharded_over_eight_devices_give_the_same_values(kind):
    x = normal(8, 6, 4)
    layer = nn.MoE(nn.Linear(5), 3)
    trainables, _ = layer.init(RNG, x)

    def loss(trainables, x):
        (y, losses), _ = layer.fwd(x, trainables)
        return (y * y).mean() + losses["balance"].mean()

    want = jax.jit(jax.value_and_grad(loss))(trainables, x)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("data")))
        shared = jax.device_put(trainables, NamedSharding(mesh, P()))
        got = jax.jit(jax.value_and_grad(loss))(shared, placed)
    assert_close(got, want, 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.MoE(nn.Linear(3), 2, k=3), r"k is 3, but must be from 1 to the number of experts, 2"),
        (lambda: nn.MoE(nn.Linear(3), 2, k=0), r"k is 0, but must be from 1"),
        (lambda: nn.MoE(nn.Linear(3), 2, capacity_factor=0.0), r"must be above 0, or None"),
        (lambda: nn.MoE(nn.Linear(3), 2, noise=1.0), r"noise is 1.0"),
        (lambda: nn.MoE(nn.Linear(3), 4).init(RNG, jnp.ones((2, 3))), r"must be \(b, ..., d\).*x\[None\]"),
        (lambda: nn.MoE(mlax.F(jnp.transpose), 4).init(RNG, jnp.ones((2, 3, 4))), r"may change only the last axis"),
    ],
)
def test_errors_say_what_is_wrong(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_an_expert_that_is_not_a_layer_is_an_error():
    with pytest.raises(TypeError, match="which is not a layer"):
        nn.MoE(jnp.tanh, 2)
