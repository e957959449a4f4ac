"""The step: equal to a hand-written one, compiled once, and guarded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mlax
from mlax import dtypes, nn, optim, train
from tests.asserts import assert_close, unequal_leaves
from tests.train.tasks import MODEL, OPTIMIZER, arrays, batch, feed, init_state, objective


def compilations(function):
    """The number of programs that were compiled while `function` ran."""
    seen = []

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        function()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(seen)


def test_a_step_equals_a_hand_written_one():
    step = train.step(objective, OPTIMIZER)
    state = init_state(step)
    weights, statistics, slots, rng = jax.tree.map(
        jnp.copy, (state.trainables, state.non_trainables, state.optimizer, state.rng)
    )

    @jax.jit
    def by_hand(weights, statistics, slots, rng, batch):
        def loss(weights):
            logits, new = MODEL.fwd(batch["x"], weights, statistics, rng=rng)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), new

        (value, statistics), grads = jax.value_and_grad(loss, has_aux=True)(weights)
        return *OPTIMIZER.update(grads, slots, weights), statistics, value

    for i in range(5):
        state, metrics = step(state, batch(seed=i))
        weights, slots, statistics, value = by_hand(
            weights, statistics, slots, jax.random.fold_in(rng, i), batch(seed=i)
        )
        np.testing.assert_allclose(metrics["loss"], value, 1e-6)
    assert_close((state.trainables, state.non_trainables, state.optimizer), (weights, statistics, slots), 1e-5, 1e-6)
    assert int(state.step) == 5 and int(state.skipped) == 0


def test_a_step_compiles_once():
    step = train.step(objective, OPTIMIZER)
    state, _ = step(init_state(step), batch())
    batches = [batch(seed=i) for i in range(10)]

    def ten():
        nonlocal state
        for each in batches:
            state, _ = step(state, each)
        jax.block_until_ready(state)

    assert compilations(ten) == 0
    assert len(step.aot.compiled) == 1


def test_a_step_compiles_for_as_many_signatures_as_allowed():
    step = train.step(objective, OPTIMIZER, compilations=2)
    state = init_state(step)
    for size in (8, 16, 8, 16):
        state, _ = step(state, batch(size))
    assert len(step.aot.compiled) == 2
    with pytest.raises(train.RetraceError, match=r"\[24, 5\].*beyond compilations=2"):
        step(state, batch(24))


@pytest.mark.parametrize("masked", [False, True])
def test_microbatches_give_the_gradient_of_the_whole_batch(masked):
    model = mlax.Series(up=nn.Linear(16), tanh=mlax.F(jnp.tanh), head=nn.Linear(3))

    def plain(batch, *variables, rng=None, inference_mode=False):
        return objective(batch, *variables, rng=rng, inference_mode=inference_mode, model=model)

    given = batch(16)
    if masked:
        given = {**given, "mask": jnp.arange(16) % 5 != 0}  # the microbatches have different weights
    found = []
    for parts in (1, 2, 4):
        step = train.step(plain, optim.SGD(0.1), accumulate=parts)
        found.append(step(init_state(step, model), given))
    for state, metrics in found[1:]:
        assert_close(state.trainables, found[0][0].trainables, 1e-5, 1e-7)
        assert_close(metrics.to_numpy(), found[0][1].to_numpy(), 1e-5, 1e-6)


def test_many_steps_in_one_call_equal_single_steps():
    one, four = train.step(objective, OPTIMIZER), train.step(objective, OPTIMIZER, steps_per_call=4)
    state = init_state(one)
    batches = [batch(seed=i) for i in range(4)]
    losses = []
    for each in batches:
        state, metrics = one(state, each)
        losses.append(metrics["loss"])
    at_once, metrics = four(init_state(four), jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches))
    assert_close(at_once.trainables, state.trainables, 1e-4, 1e-6)
    np.testing.assert_allclose(metrics["loss"], losses, 1e-5)
    assert int(at_once.step) == 4


def test_a_non_finite_step_changes_only_the_counts():
    step = train.step(objective, OPTIMIZER)
    state, _ = step(init_state(step), batch())
    before = jax.tree.map(jnp.copy, state)
    state, metrics = step(state, {**batch(), "x": jnp.full((8, 5), jnp.nan)})
    assert bool(metrics["skipped"]) and not np.isfinite(metrics["loss"])
    assert not unequal_leaves(state, before._replace(step=before.step + 1, skipped=before.skipped + 1))
    state, metrics = step(state, batch())
    assert not bool(metrics["skipped"]) and np.isfinite(metrics["loss"])


def test_a_step_that_spoils_the_statistics_is_skipped():
    step = train.step(objective, OPTIMIZER)
    state, _ = step(init_state(step), batch())
    before = jax.tree.map(jnp.copy, state)
    spoilt = batch()
    spoilt["x"] = (
        spoilt["x"].at[0].set(1e20)
    )  # whose square is infinite: BatchNorm divides by infinity, which is finite
    state, metrics = step(state, spoilt)
    assert np.isfinite(metrics["loss"]) and np.isfinite(metrics["gradient_norm"]) and bool(metrics["skipped"])
    assert not unequal_leaves(state, before._replace(step=before.step + 1, skipped=before.skipped + 1))


@pytest.mark.parametrize(
    "optimizer", [optim.SGD(1e30), optim.Adam(1e30), optim.SAM(optim.SGD(1e30)), optim.from_optax(optax.sgd(1e30))]
)
def test_a_step_whose_new_weights_are_not_finite_is_skipped(optimizer):
    def steep(batch, trainables, non_trainables, rng=None, inference_mode=False):
        return trainables["w"] * 1e10, {"seen": non_trainables["seen"] + 1}

    step = train.step(steep, optimizer)
    state = step.init(jax.random.key(0), {"w": jnp.full((), 3e38)}, {"seen": jnp.full((), -jnp.inf)})
    state, metrics = step(state, {"x": jnp.ones(3)})
    assert np.isfinite(metrics["gradient_norm"]) and bool(metrics["skipped"]) and int(state.skipped) == 1
    assert float(state.trainables["w"]) == np.float32(3e38) and int(state.optimizer.step) == 0


def test_state_that_was_infinite_before_does_not_skip_the_step():
    def counting(batch, trainables, non_trainables, rng=None, inference_mode=False):
        return trainables["w"] * 2, {"best": jnp.minimum(non_trainables["best"], jnp.inf)}

    step = train.step(counting, optim.SGD(0.1))
    state = step.init(jax.random.key(0), {"w": jnp.ones(())}, {"best": jnp.full((), jnp.inf)})
    state, metrics = step(state, {"x": jnp.ones(3)})
    assert not bool(metrics["skipped"]) and float(state.trainables["w"]) == pytest.approx(0.8)


def test_without_the_guard_a_non_finite_step_is_taken():
    step = train.step(objective, OPTIMIZER, skip_nonfinite=False)
    state, metrics = step(init_state(step), {**batch(), "x": jnp.full((8, 5), jnp.nan)})
    assert "skipped" not in metrics
    assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.trainables))


def test_loss_scaling_keeps_float16_gradients_from_underflowing():
    def tiny(batch, trainables, non_trainables, rng=None, inference_mode=False):
        return (trainables["w"] * jnp.float16(1e-5)).astype(jnp.float16) * batch["x"], non_trainables

    given = {"x": jnp.full((4,), 1e-4, jnp.float16)}
    moved = {}
    for scaling in (None, train.StaticLossScale(2.0**12)):
        step = train.step(tiny, optim.SGD(1e9), scaling=scaling)
        state, _ = step(step.init(jax.random.key(0), {"w": jnp.ones((), jnp.float16)}), given)
        moved[scaling] = 1 - float(state.trainables["w"])
    assert moved[None] == 0  # 1e-9 is zero in float16
    np.testing.assert_allclose(moved[train.StaticLossScale(2.0**12)], 1, rtol=0.05)


@pytest.mark.parametrize(
    "optimizer",
    [optim.SAM(optim.SGD(1e9)), optim.LBFGS(1e9, max_search_steps=20), optim.Freeze(optim.SAM(optim.SGD(1e9)), "v")],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_optimizers_that_evaluate_the_loss_again_scale_it_too(optimizer, accumulate):
    def tiny(batch, trainables, non_trainables, rng=None, inference_mode=False):
        error = (trainables["w"] - trainables["v"]).astype(jnp.float32) * batch["x"]
        return error * error / 2, non_trainables  # its gradient is below 1e-8, zero in float16

    moved = {}
    for dtype in (jnp.float16, jnp.float32):
        step = train.step(tiny, optimizer, scaling=train.StaticLossScale(2.0**12), accumulate=accumulate)
        trainables = {"w": jnp.full((), 2, dtype), "v": jnp.ones((), dtype)}
        state, metrics = step(step.init(jax.random.key(0), trainables), {"x": jnp.full((4,), 3e-5)})
        moved[dtype] = float(state.trainables["w"]) - 2
        assert float(metrics["gradient_norm"]) > 0
    assert moved[jnp.float32] < -0.2
    np.testing.assert_allclose(moved[jnp.float16], moved[jnp.float32], rtol=0.1)


def test_a_second_gradient_that_overflows_skips_the_step_and_halves_the_scale():
    def steep(batch, trainables, non_trainables, rng=None, inference_mode=False):
        return jnp.exp(4 * trainables["w"]).astype(jnp.float32) * batch["x"], non_trainables

    scaling = train.DynamicLossScale(15_000.0)  # the gradient is 60,000; a little further it is above 65,504
    step = train.step(steep, optim.SAM(optim.SGD(0.01), radius=0.05), scaling=scaling)
    state = step.init(jax.random.key(0), {"w": jnp.zeros((), jnp.float16)})
    scales = []
    for _ in range(2):
        state, metrics = step(state, {"x": jnp.ones(4)})
        scales.append((float(metrics["scale"]), bool(metrics["skipped"])))
        assert float(metrics["gradient_norm"]) == pytest.approx(4, rel=0.01) and np.isfinite(state.trainables["w"])
    assert scales == [(15_000.0, True), (7_500.0, False)]


def test_a_dynamic_loss_scale_halves_on_overflow_and_doubles_after_finite_steps():
    step = train.step(objective, OPTIMIZER, scaling=train.DynamicLossScale(scale=8.0, every=3))
    state = init_state(step)
    scales = []
    for i in range(8):
        given = batch(seed=i)
        state, metrics = step(state, {**given, "x": given["x"] * jnp.float32(jnp.inf)} if i == 4 else given)
        scales.append(float(metrics["scale"]))
    assert scales == [8, 8, 8, 16, 16, 8, 8, 8]
    assert float(state.scaling["scale"]) == 16 and int(state.skipped) == 1


def test_float16_trains_with_a_dynamic_loss_scale():
    model = dtypes.mixed_float16(MODEL)

    def half(batch, *variables, rng=None, inference_mode=False):
        return objective(batch, *variables, rng=rng, inference_mode=inference_mode, model=model)

    step = train.step(half, OPTIMIZER, scaling=train.DynamicLossScale())
    state = init_state(step, model)
    losses = []
    for each in feed(size=16).stream(stop=60):
        state, metrics = step(state, each)
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-10:]) < 0.6 * np.mean(losses[:5])


@pytest.mark.parametrize("transformation", [optax.adam(1e-2), optax.scale_by_adam(), optax.sgd(0.1, momentum=0.9)])
def test_an_optax_optimizer_works(transformation):
    step = train.step(objective, optim.from_optax(transformation))
    state, _ = step(init_state(step), batch())
    state, metrics = step(state, batch())
    assert np.isfinite(metrics["loss"]) and int(state.step) == 2


def test_optimizers_that_evaluate_the_loss_again_receive_it():
    step = train.step(objective, optim.SAM(optim.SGD(0.1)))
    _, metrics = step(init_state(step), batch())
    assert np.isfinite(metrics["loss"])


def test_a_layer_can_be_the_objective():
    @mlax.frozen
    class Classified(mlax.Composite):
        model: mlax.Layer

        def wire(self, sub, batch):
            return optax.softmax_cross_entropy_with_integer_labels(sub.model(batch["x"]), batch["y"])

    task = Classified(MODEL)
    step = train.step(task.fwd, OPTIMIZER)
    state = step.init(jax.random.key(1), *task.init(jax.random.key(0), batch()))
    state, metrics = step(state, batch())
    assert np.isfinite(metrics["loss"])


def test_evaluation_weights_examples_equally_and_uses_averaged_weights():
    step = train.step(objective, optim.Average(optim.SGD(0.1)))
    state = init_state(step)
    for each in feed().stream(stop=7):
        state, _ = step(state, each)
    found = step.evaluation(state, train.Feed(arrays(), batch=8).epoch())  # 75 examples: the last batch is ragged
    weights, statistics = state.eval_variables(step.optimizer)
    values, _ = objective(arrays(), weights, statistics, inference_mode=True)
    np.testing.assert_allclose(found["loss"], np.mean(values["loss"]), 1e-5)
    np.testing.assert_allclose(found["accuracy"], np.mean(values["accuracy"]), 1e-6)
    assert unequal_leaves(weights, state.trainables)


def test_the_state_is_donated_and_the_callers_key_is_not():
    step = train.step(objective, OPTIMIZER)
    rng = jax.random.key(3)
    state = step.init(rng, *MODEL.init(jax.random.key(0), batch()["x"]))
    new, _ = step(state, batch())
    assert state.trainables["up"]["kernel"].is_deleted()
    jax.random.split(rng)
    assert new.rng is state.rng and not state.rng.is_deleted()  # no step changes it


def state_of(step, kind="threefry2x32", seed=3):
    return step.init(jax.random.key(seed, impl=kind), *MODEL.init(jax.random.key(0), batch()["x"]))


def test_a_key_of_another_kind_would_recompile():
    step = train.step(objective, OPTIMIZER)
    step(state_of(step, "rbg"), batch())
    with pytest.raises(train.RetraceError, match=r"state/rng was key<rbg>\[\] and is now key<urbg>\[\]"):
        step(state_of(step, "unsafe_rbg"), batch())  # whose data have the same shape
    with pytest.raises(train.RetraceError, match=r"state/rng was .* and is now missing"):
        step(state_of(step, "rbg")._replace(rng=None), batch())
    step(state_of(step, "rbg"), batch())
    twice = train.step(objective, OPTIMIZER, compilations=2)
    for kind in ("rbg", "threefry2x32", "rbg"):
        _, metrics = twice(state_of(twice, kind), batch())
        expected = jax.jit(twice.advance)(state_of(twice, kind), batch())[1]
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)


def test_states_with_different_keys_can_take_turns():
    step = train.step(objective, OPTIMIZER)
    for seed in (1, 2, 1, 2):
        state, metrics = step(state_of(step, seed=seed), batch())
        expected = jax.jit(step.advance)(state_of(step, seed=seed), batch())
        np.testing.assert_allclose(metrics["loss"], expected[1]["loss"], rtol=1e-5)
        assert jnp.array_equal(jax.random.key_data(state.rng), jax.random.key_data(state_of(step, seed=seed).rng))


def test_a_key_on_another_device_is_moved_to_the_state():
    step = train.step(objective, OPTIMIZER)
    state = state_of(step)
    step(state._replace(rng=jax.device_put(state.rng, jax.devices()[-1])), batch())


@pytest.mark.parametrize("spec", [P(), P("data")])
def test_a_state_sharded_over_eight_devices_keeps_its_sharding_and_trains_the_same(spec):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=auto, devices=jax.devices("cpu"))
    step, alone = train.step(objective, OPTIMIZER), train.step(objective, OPTIMIZER)
    state, single = init_state(step), init_state(alone)
    state = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, _spec_for(spec, leaf))), state)
    placed = jax.tree.map(lambda leaf: leaf.sharding, state)
    over = NamedSharding(mesh, P("data"))
    for i in range(5):
        given = batch(16, seed=i)
        state, metrics = step(state, jax.device_put(given, over))
        single, expected = alone(single, given)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b, state, placed))
    assert_close(metrics.to_numpy(), expected.to_numpy(), 1e-4, 1e-6)
    assert_close(state.trainables, single.trainables, 1e-4, 1e-6)
    test = feed(size=16, sharding=over)
    np.testing.assert_allclose(
        step.evaluation(state, test.epoch())["loss"], alone.evaluation(single, feed(size=16).epoch())["loss"], 1e-4
    )


def _spec_for(spec, leaf):
    return spec if leaf.ndim and leaf.shape[0] % 8 == 0 else P()


def test_a_state_can_be_initialized_under_jit():
    step = train.step(objective, OPTIMIZER, scaling=train.DynamicLossScale())

    def made(rng):
        return step.init(rng, *MODEL.init(rng, batch()["x"]))

    shapes = jax.eval_shape(made, jax.random.key(0))
    state = jax.jit(made)(jax.random.key(0))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), shapes
    )
    step(state, batch())


def test_batches_of_several_shapes_can_be_evaluated():
    step = train.step(objective, OPTIMIZER)
    state = init_state(step)
    whole = step.evaluation(state, [batch(24)])
    parts = step.evaluation(
        state, [jax.tree.map(lambda leaf: leaf[:8], batch(24)), jax.tree.map(lambda leaf: leaf[8:], batch(24))]
    )
    assert whole == pytest.approx(parts, rel=1e-5)
    assert step.evaluation(state, feed()) == step.evaluation(state, feed().epoch())


def test_training_and_evaluation_use_different_keys():
    def drawn(batch, trainables, non_trainables, rng=None, inference_mode=False):
        return trainables["w"] * 0 + jax.random.uniform(rng), non_trainables

    step = train.step(drawn, optim.SGD(0.1))
    state = step.init(jax.random.key(0), {"w": jnp.ones(())})
    evaluated = step.evaluation(state, [batch()])["loss"]
    _, metrics = step(state, batch())
    assert abs(evaluated - float(metrics["loss"])) > 1e-6


def test_a_microbatch_without_examples_does_not_spoil_a_custom_mean():
    def own_mean(batch, trainables, non_trainables, rng=None, inference_mode=False):
        weights = batch["mask"].astype(jnp.float32)
        return jnp.sum(trainables["w"] * batch["x"][:, 0] * weights) / jnp.sum(weights), non_trainables

    given = {**batch(), "mask": jnp.arange(8) == 0}
    found = []
    for parts in (1, 2):
        step = train.step(own_mean, optim.SGD(0.1), accumulate=parts)
        _, metrics = step(step.init(jax.random.key(0), {"w": jnp.ones(())}), given)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found[0], found[1], 1e-6)


def test_an_optimizer_that_evaluates_the_loss_again_uses_the_same_microbatches():
    sizes = []

    def noting(batch, *variables, rng=None, inference_mode=False):
        sizes.append(len(batch["x"]))
        return objective(batch, *variables, rng=rng, inference_mode=inference_mode)

    step = train.step(noting, optim.SAM(optim.SGD(0.1)), accumulate=4)
    step(init_state(step), batch())
    assert set(sizes) == {2}
