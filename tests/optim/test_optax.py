"""Optax under the contract of mlax, and mlax under Optax's: the same steps either way."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from mlax import optim
from tests.asserts import assert_close
from tests.catalogue.optimizers import loss, tree

STEPS = 50
ROSENBROCK = {"x": jnp.asarray([-1.2, 1.0])}
LABELS = {"dense": {"bias": "sgd", "kernel": "adam"}, "stack": {"kernel": "adam"}, "temperature": "sgd"}
MASK = {"dense": {"bias": False, "kernel": True}, "stack": {"kernel": True}, "temperature": False}
TRANSFORMATIONS = {
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-2, STEPS), weight_decay=0.1),
    "sgd": optax.sgd(0.1),
    "sgd momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lion": optax.lion(1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "chain of two momenta": optax.chain(optax.trace(0.9), optax.trace(0.5), optax.scale(-0.01)),
    "masked": optax.adamw(1e-2, mask=MASK),
    "masked from within": optax.masked(optax.adam(1e-2), MASK),
    "multi": optax.multi_transform({"adam": optax.adam(1e-2), "sgd": optax.sgd(0.1, momentum=0.9)}, LABELS),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "every second": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "if finite": optax.apply_if_finite(optax.adam(1e-2), 5),
}


def rosenbrock(trainables):
    x, y = trainables["x"]
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def by_mlax(optimizer, trainables, loss=loss, extra=False, steps=STEPS):
    def step(carry, _):
        value, grads = jax.value_and_grad(loss)(carry[0])
        given = {"value": value, "loss": loss} if extra else {}
        return optimizer.update(grads, carry[1], carry[0], **given), None

    return jax.jit(lambda carry: lax.scan(step, carry, length=steps)[0])((trainables, optimizer.init(trainables)))


def by_optax(transformation, trainables, loss=loss, extra=False, steps=STEPS):
    def step(carry, _):
        trainables, state = carry
        value, grads = jax.value_and_grad(loss)(trainables)
        given = {"value": value, "grad": grads, "value_fn": loss} if extra else {}
        updates, state = transformation.update(grads, state, trainables, **given)
        return (optax.apply_updates(trainables, updates), state), None

    with jax.numpy_dtype_promotion("standard"):
        carry = trainables, transformation.init(trainables)
        return jax.jit(lambda carry: lax.scan(step, carry, length=steps)[0])(carry)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_an_optax_transformation_takes_the_same_steps_under_the_contract(name):
    new, state = by_mlax(optim.from_optax(TRANSFORMATIONS[name]), tree("float32"))
    assert_close(new, by_optax(TRANSFORMATIONS[name], tree("float32"))[0], 1e-5, 1e-6)
    assert state.step == STEPS


def test_lbfgs_of_optax_receives_the_value_and_the_loss():
    new, _ = by_mlax(optim.from_optax(optax.lbfgs()), ROSENBROCK, rosenbrock, extra=True)
    assert_close(new, by_optax(optax.lbfgs(), ROSENBROCK, rosenbrock, extra=True)[0], 1e-4, 1e-6)
    np.testing.assert_allclose(new["x"], 1, atol=1e-3)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "masked from within", "multi", "injected", "if finite"])
def test_an_update_keeps_shapes_and_dtypes_and_compiles_once(name):
    optimizer, trainables = optim.from_optax(TRANSFORMATIONS[name]), tree("bfloat16")
    state = optimizer.init(trainables)
    before = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (trainables, state))
    traces = 0

    @jax.jit
    def update(grads, state, trainables):
        nonlocal traces
        traces += 1
        return optimizer.update(grads, state, trainables)

    for seed in (1, 2, 3):
        trainables, state = update(tree("bfloat16", seed), state, trainables)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (trainables, state)) == before
    assert traces == 1


def test_slots_are_named_as_optax_names_them_and_have_the_tree_of_the_trainables():
    trainables = tree("float32")
    state = optim.from_optax(optax.adamw(1e-2)).init(trainables)
    assert state._fields == ("step", "count", "mu", "nu")
    assert jax.tree.structure(state.mu) == jax.tree.structure(state.nu) == jax.tree.structure(trainables)


def test_two_slots_of_one_name_get_different_names():
    state = optim.from_optax(TRANSFORMATIONS["chain of two momenta"]).init(tree("float32"))
    assert state._fields == ("step", "trace", "trace_1")


def test_the_partition_gives_slots_the_specs_of_their_weights():
    specs = {"dense": {"bias": P(None), "kernel": P("a", "b")}, "stack": {"kernel": P(None, "b")}, "temperature": P()}
    state = optim.from_optax(optax.adamw(1e-2)).partition(specs, tree("float32"))
    assert state.mu == state.nu == specs and state.count == state.step == P()


def test_the_state_of_another_transformation_is_an_error():
    trainables = tree("float32")
    state = optim.from_optax(optax.sgd(0.1)).init(trainables)
    with pytest.raises(ValueError, match="another optimizer; create it with `init`"):
        optim.from_optax(optax.adam(0.1)).update(trainables, state, trainables)


MLAX = {
    "AdamW": optim.AdamW(optim.Cosine(1e-2, STEPS), decay=0.1),
    "Muon": optim.Muon(stacked=("stack/**",)),
    "ScheduleFree": optim.ScheduleFree(1e-2),
    "Groups": optim.Groups(("**/kernel", optim.NAdam(1e-2)), ("**", optim.SGD(0.1, momentum=0.9))),
    "LBFGS": optim.LBFGS(history=3, max_search_steps=5),
    "Plateau": optim.Plateau(optim.SGD(0.1), patience=2),
}


@pytest.mark.parametrize("name", MLAX)
def test_an_mlax_optimizer_takes_its_own_steps_inside_a_chain_of_optax(name):
    chain = optax.chain(optax.scale(2.0), optax.scale(0.5), optim.to_optax(MLAX[name]))
    steps = 5 if name == "LBFGS" else STEPS  # then it is at the minimum, where rounding leads it
    new, state = by_optax(chain, tree("float32"), extra=True, steps=steps)
    wanted, wanted_state = by_mlax(MLAX[name], tree("float32"), extra=True, steps=steps)
    assert_close(new, wanted, 1e-4, 1e-5)
    assert_close(state[-1], wanted_state, 1e-3, 1e-4)


def test_optax_clips_for_an_mlax_optimizer_as_mlax_does():
    chain = optax.chain(optax.clip_by_global_norm(0.5), optim.to_optax(optim.Adam(1e-2)))
    assert_close(
        by_optax(chain, tree("float32"))[0],
        by_mlax(optim.ClipGlobalNorm(optim.Adam(1e-2), 0.5), tree("float32"))[0],
        1e-5,
        1e-6,
    )


def test_from_optax_inverts_to_optax():
    optimizer = optim.from_optax(optim.to_optax(optim.Adam(1e-2)))
    new, state = by_mlax(optimizer, tree("float32"))
    assert_close(new, by_mlax(optim.Adam(1e-2), tree("float32"))[0], 1e-5, 1e-6)
    assert state._fields[-2:] == ("mean", "square")


def test_the_error_of_an_mlax_optimizer_without_params_says_that_it_needs_them():
    transformation = optim.to_optax(optim.Adam(1e-2))
    with pytest.raises(ValueError, match=r"needs the weights; call update\(grads, state, params\)"):
        transformation.update(tree("float32"), transformation.init(tree("float32")))
