"""The rate that a step reports is the one it used, and hyperparameters can be overridden without recompiling."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mlax import optim, place, train
from tests.train.tasks import feed, init_state, objective

SGD = optim.SGD(0.5)
HALVES = optim.Plateau(SGD, factor=0.5, patience=0, threshold=0.0)


def linear(batch, trainables, non_trainables, rng=None, inference_mode=False):
    return trainables["a"] * 2 + trainables["b"], non_trainables


def constant(batch, trainables, non_trainables, rng=None, inference_mode=False):
    return never_improving(trainables["a"]), non_trainables


def never_improving(x):
    """A loss of 1 whose gradient is 1: it never improves."""
    return 1 + x - jax.lax.stop_gradient(x)


def run(objective, optimizer, steps, *, name="rate", **options):
    """The rates that the steps report as `name`, and by how much each moved `a` down."""
    step = train.step(objective, optimizer, **options)
    state = step.init(jax.random.key(0), {"a": jnp.zeros(()), "b": jnp.zeros(())})
    rates, moves = [], []
    for _ in range(steps):
        before = float(state.trainables["a"])
        state, metrics = step(state, {"x": jnp.ones(2)})
        rates.append(float(metrics[name]))
        moves.append(before - float(state.trainables["a"]))
    return rates, moves


@pytest.mark.parametrize(
    "optimizer",
    [
        HALVES,
        optim.ClipGlobalNorm(HALVES, 100.0),
        optim.Groups(("b", SGD), ("**", HALVES)),
        optim.Plateau(optim.SGD(optim.LinearSchedule(0.5, 0.1, 4)), factor=0.5, patience=1, threshold=0.0),
        optim.Average(optim.SGD(optim.LinearSchedule(0.5, 0.1, 4))),
    ],
)
def test_the_reported_rate_is_the_rate_of_the_update(optimizer):
    rates, moves = run(constant, optimizer, 4)
    np.testing.assert_allclose(rates, moves, 1e-5)
    assert len(set(rates)) > 1


def test_each_group_reports_its_rate():
    groups = optim.Groups(("b", HALVES), ("a", optim.SGD(optim.LinearSchedule(0.5, 0.1, 4))))
    rates, moves = run(constant, optim.ClipGlobalNorm(groups, 100.0), 4, name="rate/a")
    np.testing.assert_allclose(rates, moves, 1e-5)
    assert len(set(rates)) > 1


def test_the_rate_of_a_group_is_named_after_its_first_pattern_without_wildcards():
    inside = optim.Groups(("decoder/*/kernel", optim.SGD(5)), ("**", optim.SGD(6)))
    groups = optim.Groups(
        ("embed/**", optim.SGD(1)),
        (("!**/bias", "**/kernel", "**/table"), optim.SGD(2)),
        (("head/kernel", "head/bias"), optim.SGD(3)),
        ("**/kernel", optim.SGD(4)),
        ("decoder/**", inside),
        ("!out/**", optim.SGD(7)),
        ("**", optim.SGD(8)),
    )
    assert groups.learning_rates(optim.UpdateContext(jnp.int32(0), {}), {}, {}) == {
        "rate/embed": 1,
        "rate/kernel": 2,
        "rate/head/kernel": 3,
        "rate/kernel_3": 4,
        "rate/decoder/decoder/kernel": 5,
        "rate/decoder": 6,
        "rate": 7,
        "rate_6": 8,
    }


def test_the_reported_rate_includes_the_warm_up_of_schedule_free():
    rates, _ = run(constant, optim.ScheduleFree(0.4, warmup=4), 5)
    np.testing.assert_allclose(rates, [0.1, 0.2, 0.3, 0.4, 0.4], 1e-6)


def test_the_reported_rate_of_accumulated_gradients_is_that_of_the_optimizer_inside():
    rates, _ = run(constant, optim.Accumulate(optim.SGD(optim.LinearSchedule(1.0, 0.0, 4)), 2), 4)
    np.testing.assert_allclose(rates, [1.0, 1.0, 0.75, 0.75], 1e-6)


def test_an_optimizer_without_a_rate_reports_none():
    step = train.step(constant, optim.from_optax(optax.sgd(0.1)))
    _, metrics = step(step.init(jax.random.key(0), {"a": jnp.zeros(()), "b": jnp.zeros(())}), {"x": jnp.ones(2)})
    assert "rate" not in metrics


@pytest.mark.parametrize("options", [{}, {"steps_per_call": 2}])
def test_a_call_can_override_hyperparameters_without_recompiling(options):
    step = train.step(linear, optim.ClipGlobalNorm(optim.SGD(0.5, momentum=0.0), 100.0), **options)
    state = step.init(jax.random.key(0), {"a": jnp.zeros(()), "b": jnp.zeros(())})
    calls, given = step.steps_per_call, {"x": jnp.ones((2, 2))}
    for rate in (0.5, np.float32(0.25), jnp.asarray(0.125)):
        before = float(state.trainables["b"])
        state, metrics = step(state, given, rate=rate)
        assert before - float(state.trainables["b"]) == pytest.approx(calls * float(rate))
        np.testing.assert_allclose(metrics["rate"], np.full_like(metrics["rate"], rate))
    assert len(step.overriding_aot.compiled) == 1 and not step.aot.compiled
    step.flops()  # of the program that was compiled
    state, _ = step(state, given)  # a second program, with the optimizer's own rate
    assert len(step.aot.compiled) == 1


def test_an_override_is_no_implicit_transfer_and_reaches_all_devices_of_a_plan():
    plan = place.data(2).over(jax.devices()[:2])
    step = train.step(linear, optim.SGD(0.5), plan=plan)
    state = step.init(jax.random.key(0), {"a": jnp.zeros(()), "b": jnp.zeros(())})
    given = jax.device_put({"x": np.ones((2, 2), np.float32)}, plan.batch_sharding)
    state, _ = step(state, given, rate=0.5)
    with jax.transfer_guard("disallow"):
        state, _ = step(state, given, rate=0.25)
    assert float(state.trainables["b"]) == -0.75


def test_wrong_overrides_are_rejected_before_anything_is_donated():
    step = train.step(linear, optim.SGD(0.5, momentum=0.5))
    state = step.init(jax.random.key(0), {"a": jnp.zeros(()), "b": jnp.zeros(())})
    given = {"x": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"rate is -1, but must be finite"):
        step(state, given, rate=-1.0)
    with pytest.raises(TypeError, match=r"no hyperparameter 'lr'; it has .*rate"):
        step(state, given, lr=1.0)
    state, _ = step(state, given, rate=1.0)
    with pytest.raises(train.RetraceError, match="hyperparams/momentum was missing"):
        step(state, given, rate=1.0, momentum=0.9)
    step(state, given, rate=0.5)


def test_fit_sets_the_rate_of_each_step_by_a_function(tmp_path):
    step = train.step(objective, optim.SGD(0.5))
    rates = tmp_path / "rate"
    rates.write_text("0.25")

    def read_rate(done):
        if done == 3:
            rates.write_text("0.125")
        return {"rate": float(rates.read_text())}

    train.fit(step, init_state(step), feed(), steps=5, run=tmp_path / "run", hyperparams=read_rate, show=False)
    records = [record for record in train.read_records(tmp_path / "run" / "metrics.jsonl") if "rate" in record]
    assert [record["rate"] for record in records] == [0.25, 0.25, 0.25, 0.125, 0.125]
    assert len(step.overriding_aot.compiled) == 1
