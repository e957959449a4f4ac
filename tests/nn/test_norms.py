"""Norms against PyTorch, in many shapes, on several devices, and at the limits of narrow dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mlax
from mlax import dtypes, nn, ops
from tests.arrays import normal
from tests.asserts import assert_close_to_scale
from tests.nn.norm_references import differentiated, torch

RNG = jax.random.key(0)


@pytest.mark.parametrize(
    "case, layer",
    [
        ("flat", nn.BatchNorm()),
        ("image", nn.BatchNorm(axis=1, momentum=0.3, eps=1e-3)),
        ("narrow", nn.BatchNorm(axis=-2)),
        ("volume", nn.BatchNorm(axis=1)),
    ],
)
def test_batch_norm_agrees_with_pytorch_step_by_step(case, layer):
    case = torch(f"batch_norm {case}")
    trainables, state = layer.init(RNG, case["0/x"])
    trainables = {"scale": jnp.asarray(case["weight"]), "shift": jnp.asarray(case["bias"])}
    for step in ("0", "1", "2", "eval"):
        x, g = case[f"{step}/x"], case[f"{step}/g"]
        y, state, by_weights, by_x = differentiated(layer, x, trainables, state, g, inference_mode=step == "eval")
        assert_close_to_scale(y, case[f"{step}/y"])
        assert_close_to_scale(by_x, case[f"{step}/d_x"])
        assert_close_to_scale(by_weights["scale"], case[f"{step}/d_weight"])
        assert_close_to_scale(by_weights["shift"], case[f"{step}/d_bias"])
        last = step if step != "eval" else "2"
        assert_close_to_scale(state["mean"], case[f"{last}/running_mean"])
        assert_close_to_scale(state["var"], case[f"{last}/running_var"])


@pytest.mark.parametrize(
    "case, layer",
    [
        ("layer_norm", nn.LayerNorm()),
        ("layer_norm two axes", nn.LayerNorm(axes=(-2, -1), eps=1e-3)),
        ("rms_norm", nn.RMSNorm()),
        ("rms_norm two axes", nn.RMSNorm(axes=(-2, -1), eps=1e-3)),
        ("group_norm 1", nn.GroupNorm(1, axis=1)),
        ("group_norm 2", nn.GroupNorm(2, axis=-3, eps=1e-3)),
        ("group_norm 3 flat", nn.GroupNorm(3)),
        ("group_norm 6", nn.GroupNorm(6, axis=1)),
        ("instance_norm line", nn.InstanceNorm(axis=1)),
        ("instance_norm image", nn.InstanceNorm(axis=1, eps=1e-3)),
    ],
)
def test_norms_of_an_example_agree_with_pytorch(case, layer):
    case = torch(case)
    trainables = {"scale": jnp.asarray(case["weight"])}
    if "bias" in case:
        trainables["shift"] = jnp.asarray(case["bias"])
    y, _, by_weights, by_x = differentiated(layer, case["0/x"], trainables, None, case["0/g"])
    assert_close_to_scale(y, case["0/y"])
    assert_close_to_scale(by_x, case["0/d_x"])
    assert_close_to_scale(by_weights["scale"], case["0/d_weight"])
    if "bias" in case:
        assert_close_to_scale(by_weights["shift"], case["0/d_bias"])


@settings(max_examples=8, deadline=None)
@given(shape=st.lists(st.integers(1, 4), min_size=2, max_size=4), axis=st.integers(1, 3), data=st.data())
def test_batch_statistics_are_those_of_each_channel(shape, axis, data):
    axis = min(axis, len(shape) - 1) - data.draw(st.sampled_from([0, len(shape)]))
    x = normal(*shape, mean=3.0)

    @jax.jit
    def both(x):
        mean, var, count = ops.batch_statistics(x, axis=axis)
        assert count == x.size // shape[axis]
        return mean, var, ops.batch_norm(x, mean, var, axis=axis)

    mean, var, y = map(np.asarray, both(x))
    for channel in range(shape[axis]):
        values = np.take(np.asarray(x, np.float64), channel, axis)
        assert_close_to_scale(mean[channel], values.mean())
        assert_close_to_scale(var[channel], values.var())
        assert_close_to_scale(np.take(y, channel, axis), (values - values.mean()) / np.sqrt(values.var() + 1e-5), 1e-3)


@settings(max_examples=8, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    groups=st.integers(1, 3),
    size=st.integers(1, 3),
    axis=st.integers(1, 3),
)
def test_group_norm_equals_a_loop_over_examples_and_groups(shape, groups, size, axis):
    axis = min(axis, len(shape))
    x = normal(*shape[:axis], groups * size, *shape[axis:])
    y = np.asarray(jax.jit(functools.partial(ops.group_norm, groups=groups, axis=axis))(x))
    for example in range(shape[0]):
        for group in range(groups):
            where = (example, *[slice(None)] * (axis - 1), slice(group * size, (group + 1) * size))
            values = np.asarray(x, np.float64)[where]
            assert_close_to_scale(y[where], (values - values.mean()) / np.sqrt(values.var() + 1e-5), 1e-3)


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm(), nn.RMSNorm(), nn.GroupNorm(2), nn.InstanceNorm(), nn.LayerNorm()], ids=repr
)
def test_an_empty_batch_stays_empty_and_leaves_the_state_finite(layer):
    x = jnp.zeros((0, 3, 4))
    trainables, state = layer.init(RNG, x)
    y, new = layer.fwd(x, trainables, state)
    assert y.shape == x.shape
    jax.tree.map(np.testing.assert_array_equal, new, state)


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm(), nn.GroupNorm(4), nn.InstanceNorm(), nn.LayerNorm(axes=(-2,))], ids=repr
)
def test_a_single_value_becomes_the_shift(layer):
    x = normal(1, 1, 4)
    trainables, state = layer.init(RNG, x)
    y, new = layer.fwd(x, trainables, state)
    np.testing.assert_array_equal(y, 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm(), nn.RMSNorm(), nn.GroupNorm(2), nn.InstanceNorm(), nn.LayerNorm()], ids=repr
)
def test_norms_have_forward_mode_and_second_derivatives(layer):
    with jax.enable_x64(True):
        x = normal(3, 2, 4, dtype=np.float64)
        trainables, state = layer.init(RNG, x)

        def loss(x):
            return (layer.fwd(x, trainables, state)[0] ** 3).sum()

        @jax.jit
        def derivatives(x):
            step = 1e-5 * (x + 1)
            once, twice = jax.jvp(jax.grad(loss), (x,), (x + 1,))
            near = (jax.grad(loss)(x + step) - jax.grad(loss)(x - step)) / 2e-5
            return jax.jvp(loss, (x,), (x + 1,))[1], (once * (x + 1)).sum(), twice, near

        forward, reverse, twice, near = derivatives(x)
        assert_close_to_scale(forward, reverse, 1e-12)
        assert_close_to_scale(twice, near, 1e-6)


def test_bias_corrected_statistics_do_not_depend_on_their_initial_values():
    layer = nn.BatchNorm(corrected=True, momentum=0.2)
    trainables, state = layer.init(RNG, normal(6, 3))
    sums, weight = np.zeros((2, 3)), 0.0
    for step in range(5):
        x = normal(6, 3, seed=step, mean=step)
        _, state = layer.fwd(x, trainables, state)
        batch = np.asarray(x, np.float64)
        sums = 0.8 * sums + 0.2 * np.stack([batch.mean(0), batch.var(0, ddof=1)])
        weight = 0.8 * weight + 0.2
        assert_close_to_scale(state["mean"], sums[0] / weight)
        assert_close_to_scale(state["var"], sums[1] / weight)
    assert state["count"] == 5


def test_the_bias_correction_is_not_rounded_to_a_narrow_dtype():
    layer = nn.BatchNorm(corrected=True, momentum=0.001)  # 1 - 0.001 is 1 in bfloat16
    x = normal(64, 3, mean=2.0, dtype=jnp.bfloat16)
    trainables, state = layer.init(RNG, x)
    for _ in range(3):
        _, state = layer.fwd(x, trainables, state)
    mean, _, _ = ops.batch_statistics(x)
    np.testing.assert_array_equal(state["mean"], mean)


def test_a_frozen_batch_norm_uses_its_running_statistics_in_training():
    layer, x = nn.BatchNorm(frozen=True), normal(6, 3)
    trainables, state = layer.init(RNG, x)
    state = {"mean": state["mean"] + 2.0, "var": state["var"] * 4.0}
    y, new = layer.fwd(x, trainables, state)
    assert new is state
    assert_close_to_scale(y, (np.asarray(x) - 2.0) / np.sqrt(4.0 + 1e-5))
    jax.jit(layer.fwd)(x, trainables, state, inference_mode=True)  # it does not even read inference_mode


def test_the_state_carries_no_gradient():
    layer, x = nn.BatchNorm(), normal(6, 3)
    trainables, state = layer.init(RNG, x)
    grad = jax.grad(lambda x: sum(leaf.sum() for leaf in jax.tree.leaves(layer.fwd(x, trainables, state)[1])))(x)
    np.testing.assert_array_equal(grad, 0)


def test_the_state_can_be_carried_through_a_scan():
    layer, xs = nn.BatchNorm(corrected=True, accum_dtype="float32"), normal(4, 6, 3, dtype=jnp.bfloat16)
    trainables, state = layer.init(RNG, xs[0])
    scanned, _ = lax.scan(lambda state, x: layer.fwd(x, trainables, state)[::-1], state, xs)
    for x in xs:
        _, state = layer.fwd(x, trainables, state)
    assert_close_to_scale(scanned, state)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_sharded_batch_has_the_statistics_of_the_whole_batch(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    layer, x = nn.BatchNorm(), normal(16, 3, 4) + jnp.arange(16.0)[:, None, None]
    trainables, state = layer.init(RNG, x)
    g = normal(*x.shape, seed=1)
    whole = differentiated(layer, x, trainables, state, g)
    with jax.set_mesh(mesh):
        over = NamedSharding(mesh, P("data"))
        sharded = differentiated(layer, jax.device_put(x, over), trainables, state, jax.device_put(g, over))
    assert_close_to_scale(sharded, whole)
    assert sharded[0].sharding.is_equivalent_to(over, 3)


def over_devices(layer, x, trainables, state):
    """Each of 8 devices with its own part of the batch, under shard_map; state from all of them, side by side."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def one(x, trainables, state):
        y, new = layer.fwd(x, trainables, state)
        return y, jax.tree.map(lambda leaf: leaf[None], new)

    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"), check_vma=False))(
        x, trainables, state
    )


def test_under_shard_map_a_named_axis_gives_the_statistics_of_the_whole_batch():
    x = normal(16, 3, 4) + jnp.arange(16.0)[:, None, None]
    trainables, state = nn.BatchNorm().init(RNG, x)
    whole, moved = nn.BatchNorm().fwd(x, trainables, state)
    y, new = over_devices(nn.BatchNorm(axis_name="data"), x, trainables, state)
    assert_close_to_scale(y, whole)
    for name in ("mean", "var"):
        assert_close_to_scale(new[name], np.stack([moved[name]] * 8))
    alone, _ = over_devices(nn.BatchNorm(), x, trainables, state)
    assert np.abs(np.asarray(alone - whole)).max() > 0.1


def test_under_shard_map_the_gradients_of_the_shards_add_up():
    x, g = normal(16, 3, 4) + jnp.arange(16.0)[:, None, None], normal(16, 3, 4, seed=1)
    layer = nn.BatchNorm(axis_name="data")
    trainables, state = layer.init(RNG, x)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    fwd = jax.shard_map(
        lambda x, trainables, state: layer.fwd(x, trainables, state),
        mesh=mesh,
        in_specs=(P("data"), P(), P()),
        out_specs=(P("data"), P()),
    )
    grads = jax.jit(jax.grad(lambda t, x: (fwd(x, t, state)[0] * g).sum(), (0, 1)))(trainables, x)
    whole = jax.grad(lambda t, x: (nn.BatchNorm().fwd(x, t, state)[0] * g).sum(), (0, 1))(trainables, x)
    assert_close_to_scale(grads, whole)


def test_under_vmap_a_named_axis_gives_the_statistics_of_the_whole_batch():
    x = normal(4, 5, 3)
    trainables, state = nn.BatchNorm().init(RNG, x)
    layer = nn.BatchNorm(axis_name="parts")
    y, new = jax.vmap(lambda x: layer.fwd(x, trainables, state), axis_name="parts", out_axes=(0, None))(x)
    whole, moved = nn.BatchNorm().fwd(x, trainables, state)
    assert_close_to_scale(y, whole)
    assert_close_to_scale(new, moved)


def test_the_error_of_an_unbound_axis_name_says_what_to_do():
    layer, x = nn.BatchNorm(axis_name="data"), normal(4, 3)
    trainables, state = layer.init(RNG, x)
    layer.fwd(x, trainables, state, inference_mode=True)
    with pytest.raises(NameError, match="there is no axis of that name here; call fwd under a shard_map"):
        layer.fwd(x, trainables, state)


@pytest.mark.parametrize("std", [1e-3, 1.0, 5e3])
@pytest.mark.parametrize("norm", [ops.layer_norm, ops.rms_norm])
def test_float16_squares_neither_overflow_nor_underflow(norm, std):
    x = normal(3, 4096, std=std, dtype=np.float16)
    y = jax.jit(norm)(x)
    exact = norm(jnp.asarray(x, np.float32))
    assert_close_to_scale(y, exact, 5e-3)
    g = normal(3, 4096, seed=1, dtype=np.float16)
    by_x = jax.jit(jax.grad(lambda x: lax.reduce_sum(norm(x) * g, (0, 1))))(x)
    exact = jax.grad(lambda x: (norm(x) * jnp.asarray(g, np.float32)).sum())(jnp.asarray(x, np.float32))
    np.testing.assert_allclose(by_x, exact, atol=5e-3 * np.abs(exact).max() + 6e-8)  # the least float16


def test_a_float16_mean_of_more_elements_than_float16_can_count_is_right():
    x = normal(100_000, 2, mean=3.0, dtype=np.float16)
    mean, var, _ = ops.batch_statistics(x)
    assert_close_to_scale(mean, np.asarray(x, np.float64).mean(0), 5e-3)
    assert_close_to_scale(var, np.asarray(x, np.float64).var(0), 5e-3)


def test_mixed_precision_keeps_the_running_statistics_in_float32():
    model = dtypes.mixed_bfloat16(mlax.Series(up=nn.Linear(8), norm=nn.BatchNorm(), down=nn.SpectralNorm(nn.Linear(3))))
    x = normal(16, 4)
    trainables, state = model.init(RNG, x)
    y, new = jax.jit(model.fwd)(x, trainables, state)
    assert y.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves((state, new))} == {jnp.dtype("float32")}
    hidden = np.asarray(x) @ np.asarray(trainables["up"]["kernel"])
    np.testing.assert_allclose(new["norm"]["mean"], 0.1 * hidden.mean(0), atol=2e-3)


@pytest.mark.parametrize("layer", [nn.BatchNorm(), nn.SpectralNorm(nn.Linear(3))], ids=repr)
def test_the_error_of_state_in_another_dtype_names_both(layer):
    x = normal(16, 4)
    trainables, state = layer.init(RNG, x)
    with pytest.raises(TypeError, match=r"is float32 but is computed in bfloat16.*accum_dtype='float32'"):
        dtypes.Mixed(layer).fwd(x, trainables, state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("layer", [nn.BatchNorm(axis=1, corrected=True), nn.BatchNorm(momentum=None)])
def test_training_with_a_symbolic_batch_size_can_be_exported(layer, dtype):
    x = normal(6, 3, 3, dtype=dtype)
    variables = layer.init(RNG, x)
    (b,) = export.symbolic_shape("b")

    @jax.jit
    def train(x, trainables, state):
        def loss(trainables, x):
            y, new = layer.fwd(x, trainables, state)
            return ops.mean(y * y * y, (0, 1, 2)).reshape(()), new

        return jax.grad(loss, (0, 1), has_aux=True)(trainables, x)

    exported = export.export(train)(jax.ShapeDtypeStruct((b, 3, 3), x.dtype), *variables)
    tolerance = 16 * float(jnp.finfo(dtype).eps)
    assert_close_to_scale(exported.call(x, *variables), train(x, *variables), tolerance)


def test_without_momentum_statistics_are_the_average_over_all_batches():
    layer, batches = nn.BatchNorm(momentum=None), [normal(6, 4, seed=seed) for seed in range(3)]
    trainables, state = layer.init(RNG, batches[0])
    for x in batches:
        _, state = layer.fwd(x, trainables, state)
    assert_close_to_scale(state["mean"], np.mean([np.mean(x, 0) for x in batches], 0))
    assert_close_to_scale(state["var"], np.mean([np.var(x, 0, ddof=1) for x in batches], 0))
    assert state["count"] == 3
    with pytest.raises(ValueError, match=r"momentum is None.*corrected"):
        nn.BatchNorm(momentum=None, corrected=True)


@pytest.mark.parametrize(
    "build, shape, words",
    [
        (lambda: nn.GroupNorm(0), None, "groups is 0, but must be at least 1"),
        (lambda: nn.GroupNorm(4), (2, 3, 6), r"the 6 channels of the input \(2, 3, 6\) do not divide into 4 groups"),
        (lambda: nn.GroupNorm(2, axis=0), (2, 6), "is the batch axis"),
        (lambda: nn.GroupNorm(2, axis=2), (2, 6), "has no axis 2"),
        (lambda: nn.BatchNorm(axis=-2), (2, 6), "is the batch axis"),
        (lambda: nn.BatchNorm(axis=3), (2, 6), "has no axis 3"),
        (lambda: nn.BatchNorm(momentum=0.0), None, "pass frozen=True"),
        (lambda: nn.InstanceNorm(), (2, 6), "leaves no axis to take statistics over"),
        (lambda: nn.WeightNorm(nn.LayerNorm()), (2, 6), "no leaf of the layer is named 'kernel'; it has scale, shift"),
        (lambda: nn.WeightNorm(nn.Linear(3), axis=2), (2, 6), r"kernel has the shape \(6, 3\), which has no axis 2"),
        (lambda: nn.SpectralNorm(nn.Dropout()), (2, 6), "it has none"),
        (lambda: nn.SpectralNorm(nn.Linear(3), iterations=0), None, "both must be at least 1"),
    ],
)
def test_errors_say_what_is_wrong(build, shape, words):
    with pytest.raises(ValueError, match=words):
        build().init(RNG, jnp.ones(shape))
