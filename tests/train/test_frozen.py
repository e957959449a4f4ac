"""Frozen leaves in a step: they are not differentiated, and cost neither arithmetic nor slots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mlax
from mlax import inspect, nn, optim, place, train
from tests.asserts import assert_close, unequal_leaves
from tests.train.tasks import MODEL, batch, init_state, objective

FROZEN = "up/**"
BIG = mlax.Series(up=nn.Linear(256), tanh=mlax.F(jnp.tanh), down=nn.Linear(256), head=nn.Linear(3))
ADAM = optim.Adam(1e-3)
FREEZE = optim.Freeze(ADAM, FROZEN)
OPTAX = optim.from_optax(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
CASES = {  # an optimizer, the one for the live leaves alone, and options of the step
    "Freeze": (FREEZE, ADAM, {}),
    "ClipGlobalNorm": (optim.ClipGlobalNorm(FREEZE, 1.0), optim.ClipGlobalNorm(ADAM, 1.0), {}),
    "Average": (optim.Average(optim.Accumulate(FREEZE, 2)), optim.Average(optim.Accumulate(ADAM, 2)), {}),
    "Groups": (optim.Groups((FROZEN, FREEZE), ("**", ADAM)), ADAM, {}),
    "SAM": (optim.SAM(FREEZE), optim.SAM(ADAM), {"accumulate": 2}),
    "accumulate": (FREEZE, ADAM, {"accumulate": 4}),
    "scaling": (FREEZE, ADAM, {"scaling": train.DynamicLossScale()}),
    "steps_per_call": (FREEZE, ADAM, {"steps_per_call": 2}),
    "train": (ADAM, ADAM, {"train": "!up/**"}),
    "train of Average": (optim.Average(ADAM), optim.Average(ADAM), {"train": ("d*/**", "head/**"), "accumulate": 4}),
    "train of Muon": (optim.Muon(0.01), optim.Muon(0.01), {"train": "!up/**"}),
    "train of Optax": (OPTAX, OPTAX, {"train": ("**", "!up/**"), "scaling": train.StaticLossScale()}),
    "train with privacy": (ADAM, ADAM, {"train": "!up/**", "privacy": train.DifferentialPrivacy(clip=1.0, noise=1.0)}),
}
big_objective = functools.partial(objective, model=BIG)


def traced(objective, optimizer, trainables, given, **options):
    """The jaxpr of a call of the step, and its state."""
    step = train.step(objective, optimizer, **options)
    state = jax.eval_shape(step.init, jax.random.key(1), trainables)
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
    options = {name: value for name, value in options.items() if name != "train"}
    wanted, wanted_state = traced(apart, plain, live, given, **options)
    whole, _ = traced(big_objective, plain, trainables, given, **options)
    assert inspect.flops(found) == inspect.flops(wanted) < inspect.flops(whole)
    assert _elements(state.optimizer) == _elements(wanted_state.optimizer)


def test_a_compiled_lora_step_needs_as_much_memory_as_with_the_frozen_tree_kept_apart():
    model = mlax.wrap(BIG, nn.Linear, lambda layer: nn.LoRA(layer, rank=2))
    given, optimizer = batch(64), optim.ClipGlobalNorm(optim.AdamW(1e-3), 1.0)
    trainables, _ = jax.eval_shape(model.init, jax.random.key(0), given["x"])
    live, frozen = mlax.freeze(trainables, "!**/lora/*")
    assert mlax.count(live) < 0.05 * mlax.count(trainables)

    def objective_of(merge):
        return lambda batch, live, *args, **kwargs: objective(batch, merge(live), *args, **kwargs, model=model)

    def advance_apart(state, batch, frozen):
        return train.step(objective_of(lambda live: mlax.merge(live, frozen)), optimizer).advance(state, batch)

    step = train.step(objective_of(lambda trainables: trainables), optimizer, train="**/lora/*")
    state, apart = (jax.eval_shape(step.init, jax.random.key(1), tree) for tree in (trainables, live))
    found = _cost(step.advance, state, given)
    wanted = _cost(advance_apart, apart, given, frozen)
    assert found == wanted and _elements(state.optimizer) == _elements(apart.optimizer)


def _cost(advance, state, *rest):
    """FLOPs as XLA counts them, and the peak of memory but for 8 bytes for each output, a table of pointers."""
    compiled = jax.jit(advance, donate_argnums=0).lower(state, *rest).compile()
    memory, flops = compiled.memory_analysis(), compiled.cost_analysis()["flops"]
    outputs = memory.output_size_in_bytes - 8 * len(jax.tree.leaves(compiled.out_info))
    return flops, memory.argument_size_in_bytes + outputs - memory.alias_size_in_bytes + memory.temp_size_in_bytes


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
    step = train.step(functools.partial(objective, model=model), optim.Adam(0.1), train="!blocks/**")
    state = init_state(step, model)
    before = jax.tree.map(np.asarray, state.trainables)
    state, _ = step(state, batch())
    assert not unequal_leaves(state.trainables["blocks"], before["blocks"])
    assert unequal_leaves(state.trainables["up"], before["up"])
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.trainables["blocks"])}
    assert kinds == {"pinned_host"}


def test_streaming_does_not_differentiate_frozen_layers():
    block = mlax.wrap(mlax.Series(up=nn.Linear(8), tanh=mlax.F(jnp.tanh)), nn.Linear, lambda each: nn.LoRA(each, 2))
    resident = mlax.Series(up=nn.Linear(8), blocks=mlax.Repeat(block, 2, mode="remat"), head=nn.Linear(3))
    streamed = mlax.wrap(resident, "blocks", place.Stream)

    def flops(model, **options):
        trainables, _ = model.init(jax.random.key(0), batch()["x"])
        return inspect.flops(traced(functools.partial(objective, model=model), ADAM, trainables, batch(), **options)[0])

    assert flops(streamed, train="**/lora/*") <= flops(resident, train="**/lora/*") < flops(streamed)


def test_train_names_the_leaves_that_change():
    step = train.step(objective, optim.AdamW(1e-2), train=("head/**", "**/scale", "!head/bias"))
    state = init_state(step)
    before = jax.tree.map(jnp.copy, state.trainables)
    state, _ = step(state, batch())
    assert unequal_leaves(state.trainables, before) == ["['head']['kernel']", "['norm']['scale']"]
    same = train.step(objective, optim.Freeze(optim.AdamW(1e-2), ("up/**", "head/bias", "norm/shift")))
    wanted, _ = same(init_state(same), batch())
    assert not unequal_leaves(state.trainables, wanted.trainables)
    assert "AdamW(0.01), train=('head/**', '**/scale', '!head/bias'))" in repr(step)
    assert repr(train.step(objective, optim.SGD(0.1), train="up/**")).endswith("SGD(0.1), train='up/**')")


def test_optax_trains_the_live_leaves_and_evaluates_the_loss_of_all():
    step = train.step(objective, optim.from_optax(optax.lbfgs()), train="!up/**")
    state = init_state(step)
    before, losses = jax.tree.map(jnp.copy, state.trainables), []
    for _ in range(3):
        state, metrics = step(state, batch(32))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] and not unequal_leaves(state.trainables["up"], before["up"])
    assert unequal_leaves(state.trainables, before)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("head/kernal", KeyError, "train.step: train: 'head/kernal' matches nothing; did you mean 'head/kernel'?"),
        ("!haed/**", KeyError, "train.step: train: '!haed/**' excludes nothing; did you mean '!head/**'?"),
        (("up/**", "!up/**"), KeyError, "'up/**', '!up/**' exclude all that they match"),
        ((), TypeError, "train is (), but must be a pattern or a tuple of them"),
        (True, TypeError, "train is True, but must be a pattern or a tuple of them"),
        ("up/**", ValueError, "Freeze(SGD(0.1), frozen=('up/**',)) freezes all that train='up/**' matches"),
    ],
)
def test_patterns_that_train_nothing_are_refused(given, error, message):
    with pytest.raises(error) as caught:
        init_state(train.step(objective, optim.Freeze(optim.SGD(0.1), "up/**"), train=given))
    assert message in str(caught.value)
