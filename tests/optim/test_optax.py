"""Optax under the contract of mlax, and mlax under Optax's: the same steps either way."""

import pickle

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
    "masked by a prefix": optax.masked(optax.adam(1e-2), {"dense": True, "stack": False, "temperature": False}),
    "muon": optax.contrib.muon(1e-2),
    "every second": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "if finite": optax.apply_if_finite(optax.adam(1e-2), 5),
}
# a part or a wrapping of each is in one of the others
ALIKE = ("adam", "sgd", "lamb", "lion", "chain of two momenta", "masked", "masked from within", "if finite")


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


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough) if name in ALIKE else name for name in TRANSFORMATIONS],
)
def test_an_optax_transformation_takes_the_same_steps_under_the_contract(name):
    new, state = by_mlax(optim.from_optax(TRANSFORMATIONS[name]), tree("float32"))
    assert_close(new, by_optax(TRANSFORMATIONS[name], tree("float32"))[0], 1e-5, 1e-6)
    assert state.step == STEPS


def test_lbfgs_of_optax_receives_the_value_and_the_loss():
    new, _ = by_mlax(optim.from_optax(optax.lbfgs()), ROSENBROCK, rosenbrock, extra=True)
    assert_close(new, by_optax(optax.lbfgs(), ROSENBROCK, rosenbrock, extra=True)[0], 1e-4, 1e-6)
    np.testing.assert_allclose(new["x"], 1, atol=1e-3)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "masked by a prefix", "multi", "injected", "if finite"])
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


@pytest.mark.parametrize(("name", "slots"), [("masked from within", 2), ("masked by a prefix", 2), ("multi", 3)])
def test_masked_slots_are_sharded_like_their_weights(name, slots):
    specs = {"dense": {"bias": P("b"), "kernel": P("a", "b")}, "stack": {"kernel": P(None, "b")}, "temperature": P()}
    trainables, optimizer = tree("float32"), optim.from_optax(TRANSFORMATIONS[name])
    partition, state = optimizer.partition(specs, trainables), optimizer.init(trainables)
    moments = [field for field in state._fields if field in ("mu", "nu", "trace")]
    assert len(moments) == slots
    for moment in moments:
        leaves = jax.tree.leaves(getattr(state, moment))
        assert jax.tree.structure(getattr(state, moment)) == jax.tree.structure(trainables)
        for leaf, w, spec, wanted in zip(
            leaves,
            jax.tree.leaves(trainables),
            jax.tree.leaves(getattr(partition, moment)),
            jax.tree.leaves(specs),
            strict=True,
        ):
            assert (leaf.shape, spec) in ((w.shape, wanted), ((0,), P()))


def sharpness_aware(opaque):
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.sgd(0.1), adversary, opaque_mode=opaque)


@pytest.mark.parametrize("opaque", [True, False])
def test_sam_of_optax_receives_the_gradient_function(opaque):
    def by_optax_alone(trainables):
        transformation = sharpness_aware(opaque)
        state = transformation.init(trainables)
        for _ in range(6):
            given = {"grad_fn": lambda params, _: jax.grad(loss)(params)} if opaque else {}
            updates, state = transformation.update(jax.grad(loss)(trainables), state, trainables, **given)
            trainables = optax.apply_updates(trainables, updates)
        return trainables

    new, _ = by_mlax(optim.from_optax(sharpness_aware(opaque)), tree("float32"), extra=True, steps=6)
    with jax.numpy_dtype_promotion("standard"):
        assert_close(new, by_optax_alone(tree("float32")), 1e-5, 1e-6)


def test_sophia_of_optax_receives_the_loss():
    new, state = by_mlax(optim.from_optax(optax.contrib.sophia(1e-2)), tree("float32"), extra=True)
    assert loss(new) < loss(tree("float32")) and np.isfinite(loss(new))
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(state.nu))


def test_lookahead_of_optax_is_refused_with_the_alternative():
    with pytest.raises(TypeError, match=r"use optim\.Lookahead around an optimizer of mlax"):
        optim.from_optax(optax.lookahead(optax.sgd(0.1), 3, 0.5)).init(tree("float32"))


def test_schedule_free_of_optax_is_evaluated_at_its_average():
    transformation = optax.contrib.schedule_free_sgd(0.1)
    optimizer = optim.from_optax(transformation)
    new, state = by_mlax(optimizer, tree("float32"), steps=10)
    with jax.numpy_dtype_promotion("standard"):
        reference, inner = by_optax(transformation, tree("float32"), steps=10)
        wanted = optax.contrib.schedule_free_eval_params(inner, reference)
    assert_close(optimizer.eval_trainables(state, new), wanted, 1e-5, 1e-6)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(reference), strict=True))


def test_a_call_of_an_optax_function_can_be_pickled_and_compared():
    optimizer = optim.from_optax(optax.adamw, 1e-2, weight_decay=0.1)
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer == optim.from_optax(optax.adamw, 1e-2, weight_decay=0.1)
    assert repr(optimizer) == "from_optax(adamw, 0.01, weight_decay=0.1)"
    new, _ = by_mlax(optimizer, tree("float32"), steps=5)
    assert_close(new, by_optax(optax.adamw(1e-2, weight_decay=0.1), tree("float32"), steps=5)[0], 1e-5, 1e-6)
    with pytest.raises(pickle.PicklingError, match=r"from_optax\(optax.adam, 1e-3\)"):
        pickle.dumps(optim.from_optax(optax.adam(1e-3)))


def test_what_is_no_transformation_is_an_error():
    with pytest.raises(TypeError, match="neither an Optax transformation nor a function"):
        optim.from_optax(3)
    with pytest.raises(TypeError, match="arguments belong to a function"):
        optim.from_optax(optax.adam(1e-3), 1e-3)


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


@pytest.mark.parametrize("optimizer", [optim.AdamW(1e-2), optim.from_optax(optax.masked(optax.adam(1e-2), MASK))])
def test_the_state_of_shapes_is_shapes(optimizer):
    trainables = tree("float32")
    shapes = jax.eval_shape(lambda: trainables)
    state = optim.to_optax(optimizer).init(shapes)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), optimizer.init(trainables)
    )
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))


def test_map_params_of_optax_maps_the_slots():
    trainables = tree("float32")
    transformation = optim.to_optax(optim.NAdam(1e-2))
    with pytest.raises(TypeError, match=r"call init\(params\) first"):
        optax.tree.map_params(transformation, lambda leaf: leaf, optim.NAdam(1e-2).init(trainables))
    state = transformation.init(trainables)
    marked = optax.tree.map_params(
        transformation, lambda leaf, w: w.shape, state, trainables, transform_non_params=lambda leaf: "scalar"
    )
    assert marked.step == marked.product == "scalar"
    assert marked.mean == marked.square == jax.tree.map(jnp.shape, trainables)


def test_hyperparameters_injected_by_optax_are_part_of_its_state():
    trainables = tree("float32")
    make = optax.inject_hyperparams(lambda rate: optim.to_optax(optim.SGD(1.0), rate=rate))
    transformation = make(rate=0.5)
    state = transformation.init(trainables)
    state.hyperparams["rate"] = jnp.asarray(0.25)
    updates, _ = jax.jit(transformation.update)(trainables, state, trainables)
    assert_close(updates, jax.tree.map(lambda g: -0.25 * g, trainables), 1e-6, 1e-7)


def test_extra_arguments_that_an_optimizer_does_not_use_are_ignored():
    trainables = tree("float32")
    transformation = optim.to_optax(optim.SGD(0.5))
    plain, _ = transformation.update(trainables, transformation.init(trainables), trainables)
    extra, _ = transformation.update(trainables, transformation.init(trainables), trainables, labels=1, value=2.0)
    assert_close(plain, extra, 0, 0)
