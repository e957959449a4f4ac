"""Averaged weights are evaluated and exported with statistics that are averaged likewise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import files, nn, optim, train
from tests.asserts import assert_close, unequal_leaves
from tests.train.tasks import batch, feed, init_state, objective

SGD = optim.SGD(0.1)


def bias_corrected(seen, decay):
    weights = [decay ** (len(seen) - 2 - number) for number in range(len(seen) - 1)]
    return jax.tree.map(
        lambda *leaves: sum(w * x for w, x in zip(weights, leaves, strict=True)) / sum(weights), *seen[1:]
    )


def slow(seen, every, alpha):
    moved = seen[0]
    for new in seen[every::every]:
        moved = jax.tree.map(lambda old, new: old + alpha * (new - old), moved, new)
    return moved


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        (optim.Average(SGD, 0.9), lambda seen: bias_corrected(seen, 0.9)),
        (optim.Average(SGD, None, start=2), lambda seen: jax.tree.map(lambda *leaves: sum(leaves) / 4, *seen[3:])),
        (optim.Lookahead(SGD, 2, 0.5), lambda seen: slow(seen, 2, 0.5)),
        (optim.Accumulate(optim.Average(SGD, 0.9), 2), lambda seen: bias_corrected(seen[::2], 0.9)),
        (optim.Groups(("head/**", SGD), ("**", optim.Average(SGD, 0.9))), lambda seen: bias_corrected(seen, 0.9)),
        (SGD, lambda seen: seen[-1]),
        (optim.ScheduleFree(0.1), lambda seen: seen[-1]),
    ],
)
def test_statistics_are_averaged_as_the_weights_are_by_three_calls(optimizer, wanted):
    seen = [{"norm": {"mean": np.float32([number, 1 / (number + 1)])}} for number in range(7)]
    state = optimizer.init({"up": jnp.zeros(()), "head": {"bias": jnp.zeros(())}})
    average = optimizer.init_average(jax.tree.map(jnp.asarray, seen[0]))
    for statistics in seen[1:]:
        state = state._replace(step=state.step + 1)  # as an update does
        average = optimizer.update_average(average, jax.tree.map(jnp.asarray, statistics), state)
    assert_close(optimizer.eval_non_trainables(average, seen[-1]), wanted(seen), 1e-5, 1e-6)


def test_a_step_averages_its_statistics_and_trains_with_its_own():
    step = train.step(objective, optim.ClipGlobalNorm(optim.Average(SGD, 0.9), 1.0))
    state = init_state(step)
    seen = [jax.tree.map(np.asarray, state.non_trainables)]
    for number in range(5):
        state, _ = step(state, batch(seed=number))
        seen.append(jax.tree.map(np.asarray, state.non_trainables))
    weights, statistics = state.eval_variables(step.optimizer)
    assert_close(statistics, bias_corrected(seen, 0.9), 1e-5, 1e-6)
    assert not unequal_leaves(weights, step.optimizer.eval_trainables(state.optimizer, state.trainables))
    before = jax.tree.map(jnp.copy, state)
    state, metrics = step(state, {**batch(), "x": jnp.full((8, 5), jnp.nan)})
    assert bool(metrics["skipped"]) and not unequal_leaves(state.average, before.average)


def test_averaged_weights_are_better_with_averaged_statistics_than_with_raw_ones():
    """They are as good as with statistics that are recomputed for them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 12)).astype(np.float32) * np.linspace(0.2, 3, 12, dtype=np.float32) + 1
    hidden = np.tanh(x @ rng.normal(size=(12, 4)) / 3)
    y = (hidden[:, 0] * hidden[:, 1] + hidden[:, 2] * hidden[:, 3] > 0).astype(np.int32)
    data = {"x": x, "y": y, "id": np.arange(2000, dtype=np.int32)}
    blocks = [part for _ in range(3) for part in (nn.Linear(32, bias=False), nn.BatchNorm(), mlax.F(jax.nn.relu))]
    model = mlax.Series(*blocks, nn.Linear(3))
    aim = functools.partial(objective, model=model)
    step = train.step(aim, optim.Average(optim.SGD(0.1, momentum=0.9), 0.995))
    state = step.init(jax.random.key(1), *model.init(jax.random.key(0), x[:8]))
    for each in train.Feed(data, batch=100, seed=1).stream(stop=200):
        state, _ = step(state, each)
    weights, statistics = state.eval_variables(step.optimizer)
    own = state.non_trainables
    forward = jax.jit(lambda own, x: model.fwd(x, weights, own)[1])
    for each in train.Feed(data, batch=100, seed=2).stream(stop=50):
        own = forward(own, each["x"])
    losses = {
        name: float(jnp.mean(aim(data, weights, each, inference_mode=True)[0]["loss"]))
        for name, each in {"raw": state.non_trainables, "averaged": statistics, "own": own}.items()
    }
    assert losses["averaged"] < 0.9 * losses["raw"] and losses["averaged"] < 1.1 * losses["own"], losses


def test_narrow_statistics_are_averaged_in_float32_and_other_state_is_passed_on():
    optimizer = optim.Average(SGD, 0.999)
    state = {"mean": jnp.ones(3, jnp.bfloat16), "count": jnp.float32(0), "nothing": None}
    average = optimizer.init_average(state)
    assert average["mean"].dtype == jnp.float32 and average["count"] is None
    slots = optimizer.init({"w": jnp.ones(())})
    for number in range(1, 300):
        state = {**state, "mean": jnp.full(3, 1 + number / 300, jnp.bfloat16), "count": jnp.float32(number)}
        slots = slots._replace(step=slots.step + 1)
        average = optimizer.update_average(average, state, slots)
    shown = optimizer.eval_non_trainables(average, state)
    assert shown["mean"].dtype == jnp.bfloat16 and int(shown["count"]) == 299
    np.testing.assert_allclose(average["mean"], 1.5, 0.02)
    assert optim.Average(SGD).init_average({"count": jnp.int32(0)}) is None
    assert SGD.init_average(state) is None


def test_averaged_weights_are_evaluated_with_the_last_singular_vectors():
    """The average of unit vectors is shorter than 1."""
    model = nn.SpectralNorm(nn.Linear(3))
    step = train.step(functools.partial(objective, model=model), optim.Average(optim.SGD(1.0), 0.9))
    state = init_state(step, model)
    first = jax.tree.map(np.asarray, state.non_trainables)
    for number in range(5):
        state, _ = step(state, batch(seed=number))
    assert unequal_leaves(state.non_trainables, first)
    assert not unequal_leaves(state.eval_variables(step.optimizer)[1], state.non_trainables)


def test_statistics_of_a_group_are_averaged_if_its_weights_are():
    optimizer = optim.Groups(("a/**", optim.Average(SGD, 0.5)), ("**", SGD))
    state = optimizer.init({"a": {"kernel": jnp.zeros(())}, "b": {"kernel": jnp.zeros(())}})
    leaves = {"norm": {"mean": 0.0, "var": 0.0, "count": 0.0}, "kernel": {"left": 0.0}}
    zeros = jax.tree.map(np.float32, {"a": leaves, "b": leaves})
    seen = [jax.tree.map(lambda zero, number=number: zero + np.float32(number), zeros) for number in range(3)]
    average = optimizer.init_average(seen[0])
    for statistics in seen[1:]:
        state = state._replace(step=state.step + 1)
        average = optimizer.update_average(average, statistics, state)
    averaged, last = bias_corrected(seen, 0.5)["a"]["norm"], seen[-1]
    norm = {"mean": averaged["mean"], "var": averaged["var"], "count": last["a"]["norm"]["count"]}
    wanted = {"a": {"norm": norm, "kernel": last["a"]["kernel"]}, "b": last["b"]}
    assert_close(optimizer.eval_non_trainables(average, last), wanted, 1e-6)


def test_statistics_that_no_group_matches_are_averaged_by_the_first_group_that_averages():
    optimizer = optim.Groups(("**/bias", SGD), ("**/kernel", optim.Average(SGD, 0.5)))
    assert optimizer.init_average({"norm": {"mean": jnp.zeros(())}}) == {"norm": {"mean": 0}}


def test_fit_exports_and_evaluates_the_averaged_statistics(tmp_path):
    step = train.step(objective, optim.Average(SGD, 0.9))
    result = train.fit(step, init_state(step), feed(), steps=12, evaluate=feed(), run=tmp_path, show=False)
    weights, statistics = result.state.eval_variables(step.optimizer)
    assert unequal_leaves(statistics, result.state.non_trainables)
    for name in ("last.safetensors", "best.safetensors"):
        exported = files.load(tmp_path / name)
        assert_close(exported["non_trainables"], statistics, 1e-6)
        assert_close(exported["trainables"], weights, 1e-6)
    restored = train.Checkpoints(tmp_path / "checkpoints").restore(result.state).tree
    assert not unequal_leaves(restored.average, result.state.average)
