"""Frozen leaves in a step: they are not differentiated, and cost neither arithmetic nor slots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import inspect, nn, optim, place, train
from tests.asserts import assert_close, unequal_leaves
from tests.train.tasks import MODEL, batch, init_state, objective

FROZEN = "up/**"
BIG = mlax.Series(up=nn.Linear(256), tanh=mlax.F(jnp.tanh), down=nn.Linear(256), head=nn.Linear(3))
ADAM = optim.Adam(1e-3)
FREEZE = optim.Freeze(ADAM, FROZEN)
CASES = {  # an optimizer, the one for the live leaves alone, and options of the step
    "Freeze": (FREEZE, ADAM, {}),
    "ClipGlobalNorm": (optim.ClipGlobalNorm(FREEZE, 1.0), optim.ClipGlobalNorm(ADAM, 1.0), {}),
    "Average": (optim.Average(optim.Accumulate(FREEZE, 2)), optim.Average(optim.Accumulate(ADAM, 2)), {}),
    "Groups": (optim.Groups((FROZEN, FREEZE), ("**", ADAM)), ADAM, {}),
    "SAM": (optim.SAM(FREEZE), optim.SAM(ADAM), {"accumulate": 2}),
    "accumulate": (FREEZE, ADAM, {"accumulate": 4}),
    "scaling": (FREEZE, ADAM, {"scaling": train.DynamicLossScale()}),
    "steps_per_call": (FREEZE, ADAM, {"steps_per_call": 2}),
}
big_objective = functools.partial(objective, model=BIG)


def traced(objective, optimizer, trainables, given, **options):
    """The jaxpr of a call of the step, and its state."""
    step = train.step(objective, optimizer, **options)
    state = step.init(jax.random.key(1), trainables)
    if step.steps_per_call > 1:
        given = jax.tree.map(lambda leaf: jnp.stack([leaf] * step.steps_per_call), given)
    return jax.make_jaxpr(step.aot.function)(state, given), state


@pytest.mark.parametrize("case", CASES)
def test_freezing_costs_as_many_flops_and_slots_as_keeping_the_frozen_tree_apart(case):
    freezing, plain, options = CASES[case]
    given = batch(64)
    trainables, _ = BIG.init(jax.random.key(0), given["x"])
    live, frozen = mlax.freeze(trainables, FROZEN)

    def apart(batch, live, *args, **kwargs):
        return big_objective(batch, mlax.merge(live, frozen), *args, **kwargs)

    found, state = traced(big_objective, freezing, trainables, given, **options)
    wanted, wanted_state = traced(apart, plain, live, given, **options)
    whole, _ = traced(big_objective, plain, trainables, given, **options)
    assert inspect.flops(found) == inspect.flops(wanted) < inspect.flops(whole)
    assert _elements(state.optimizer) == _elements(wanted_state.optimizer)


def _elements(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_a_step_with_frozen_leaves_equals_an_update_with_all_gradients():
    optimizer = optim.ClipGlobalNorm(optim.Freeze(optim.AdamW(1e-2), FROZEN), 0.1)
    step = train.step(objective, optimizer, accumulate=2)
    state = init_state(step)
    before = jax.tree.map(jnp.copy, state)
    state, metrics = step(state, batch())
    rng = jax.random.fold_in(before.rng, 0)
    found = train.gradients(objective, batch(), before.trainables, before.non_trainables, rng, accumulate=2)
    wanted, _ = optimizer.update(found.grads, before.optimizer, before.trainables)
    assert_close(state.trainables, wanted, 1e-5, 1e-6)
    assert not unequal_leaves(state.trainables["up"], before.trainables["up"])
    live = {name: part for name, part in found.grads.items() if name != "up"}
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(live)))
    np.testing.assert_allclose(metrics["gradient_norm"], norm, 1e-5)


def test_optimizers_accept_gradients_without_the_frozen_leaves():
    optimizer = optim.Freeze(optim.SGD(0.1), FROZEN)
    trainables, _ = MODEL.init(jax.random.key(0), batch()["x"])
    state = optimizer.init(trainables)
    ones = jax.tree.map(jnp.ones_like, trainables)
    wanted, _ = optimizer.update(ones, state, trainables)
    left_out = {name: part for name, part in ones.items() if name != "up"}
    for grads in (left_out, {**left_out, "up": {"kernel": None}}, {**left_out, "up": None}):
        assert not unequal_leaves(optimizer.update(grads, state, trainables)[0], wanted)
    with pytest.raises(ValueError, match="they lack 'head/bias'"):
        optimizer.update({**left_out, "head": {"kernel": ones["head"]["kernel"]}}, state, trainables)


def test_everything_can_be_frozen():
    step = train.step(objective, optim.Freeze(optim.Adam(0.1), "**"))
    state = init_state(step)
    before = jax.tree.map(jnp.copy, state.trainables)
    state, metrics = step(state, batch())
    assert not unequal_leaves(state.trainables, before) and float(metrics["gradient_norm"]) == 0


@pytest.mark.parametrize("wrapped", [optim.LBFGS(), optim.SAM(optim.SGD(0.1))])
def test_optimizers_that_evaluate_the_loss_train_the_live_leaves(wrapped):
    model = mlax.Series(up=nn.Linear(8), tanh=mlax.F(jnp.tanh), head=nn.Linear(3))
    step = train.step(functools.partial(objective, model=model), optim.Freeze(wrapped, FROZEN))
    state = init_state(step, model)
    before = jax.tree.map(jnp.copy, state.trainables)
    losses = []
    for _ in range(5):
        state, metrics = step(state, batch(32))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] and not unequal_leaves(state.trainables["up"], before["up"])


def test_frozen_leaves_in_host_memory_stay_there_unchanged():
    block = mlax.Series(up=nn.Linear(8), tanh=mlax.F(jnp.tanh))
    model = mlax.Series(up=nn.Linear(8), blocks=place.Stream(mlax.Repeat(block, 2)), head=nn.Linear(3))
    step = train.step(functools.partial(objective, model=model), optim.Freeze(optim.Adam(0.1), "blocks/**"))
    state = init_state(step, model)
    before = jax.tree.map(np.asarray, state.trainables)
    state, _ = step(state, batch())
    assert not unequal_leaves(state.trainables["blocks"], before["blocks"])
    assert unequal_leaves(state.trainables["up"], before["up"])
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.trainables["blocks"])}
    assert kinds == {"pinned_host"}
