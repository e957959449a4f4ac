"""Wrappers of optimizers do what they say and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import optim
from tests.arrays import normal
from tests.asserts import assert_close
from tests.catalogue.optimizers import tree


def steps(optimizer, count=5, trainables=None, grads=None, **numbers):
    """The trainables and the state after some steps."""
    trainables = tree("float32") if trainables is None else trainables
    state = optimizer.init(trainables)
    update = jax.jit(optimizer.update)
    for step in range(count):
        given = tree("float32", step + 1) if grads is None else grads[step]
        trainables, state = update(given, state, trainables, **numbers)
    return trainables, state


def test_frozen_leaves_stay_bitwise_unchanged_and_have_no_slots():
    before, (after, state) = tree("float32"), steps(optim.Freeze(optim.Adam(1e-2), ("dense/*",)))
    free, _ = steps(optim.Adam(1e-2))
    jax.tree.map(np.testing.assert_array_equal, after["dense"], before["dense"])
    assert_close({**after, "dense": None}, {**free, "dense": None})
    assert {leaf.shape for leaf in jax.tree.leaves((state.mean["dense"], state.square["dense"]))} == {(0,)}


def test_each_group_is_updated_by_its_optimizer():
    together, state = steps(optim.Groups(("**/kernel", optim.SGD(0.1, momentum=0.9)), ("**", optim.Adam(1e-2))))
    kernels, others = steps(optim.SGD(0.1, momentum=0.9))[0], steps(optim.Adam(1e-2))[0]
    assert_close(together["dense"], {"kernel": kernels["dense"]["kernel"], "bias": others["dense"]["bias"]})
    assert_close(together["temperature"], others["temperature"])
    assert state.momentum["dense"]["bias"].shape == state.mean["dense"]["kernel"].shape == (0,)
    assert state._fields == ("step", "mean", "square", "momentum")


def test_the_first_matching_pattern_applies():
    found, _ = steps(
        optim.Groups(("dense/kernel", optim.SGD(0.0)), ("**/kernel", optim.SGD(0.1)), ("**", optim.SGD(0.0)))
    )
    before = tree("float32")
    np.testing.assert_array_equal(found["dense"]["kernel"], before["dense"]["kernel"])
    assert (found["stack"]["kernel"] != before["stack"]["kernel"]).all()


def test_leaves_can_have_their_own_rates():
    found, _ = steps(optim.Rates(optim.Adam(1e-2), (("**/bias", 0.1), ("**/b*", 9.0))))
    slow, fast = steps(optim.Adam(1e-3))[0], steps(optim.Adam(1e-2))[0]
    assert_close(found["dense"], {"bias": slow["dense"]["bias"], "kernel": fast["dense"]["kernel"]})


def test_layerwise_rates_decay_from_layer_to_layer_and_within_a_stack():
    optimizer = optim.LayerwiseRates(
        optim.SGD(1.0), ("stack/**", "dense/**", "temperature"), 0.5, stacked=("stack/**",)
    )
    ones = jax.tree.map(jnp.ones_like, tree("float32"))
    found, _ = steps(optimizer, 1, jax.tree.map(jnp.zeros_like, ones), [ones])
    assert found["temperature"] == -1 and (found["dense"]["kernel"] == -0.5).all()
    np.testing.assert_array_equal(found["stack"]["kernel"][:, 0, 0], [-0.125, -0.25])


def test_a_non_finite_step_changes_nothing():
    grads = [tree("float32", seed) for seed in (1, 2, 3)]
    bad = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(jnp.nan), tree("float32", 9))
    clean, wanted = steps(optim.NAdam(1e-2), 3, grads=grads)
    found, state = steps(optim.SkipNonFinite(optim.NAdam(1e-2)), 5, grads=[grads[0], bad, grads[1], bad, grads[2]])
    assert_close(found, clean)
    assert state.skipped == 2 and state.step == 3
    assert_close(state._asdict()["mean"], wanted.mean)


@pytest.mark.parametrize(("every", "cooldown", "falls"), [(1, 0, [4, 7, 10]), (1, 2, [4, 9]), (2, 0, [8])])
def test_a_plateau_lowers_the_rate(every, cooldown, falls):
    optimizer = optim.Plateau(optim.SGD(1.0), factor=0.5, patience=2, cooldown=cooldown, every=every)
    trainables = {"w": jnp.zeros(())}
    state = optimizer.init(trainables)
    moves = []
    for _ in range(10):
        new, state = jax.jit(optimizer.update)({"w": jnp.ones(())}, state, trainables, value=jnp.asarray(3.0))
        moves.append(float(trainables["w"] - new["w"]))
    assert [step + 1 for step in range(1, 10) if moves[step] < moves[step - 1]] == falls


def test_a_falling_loss_keeps_the_rate():
    optimizer = optim.Plateau(optim.SGD(1.0), patience=1)
    trainables = {"w": jnp.zeros(())}
    state = optimizer.init(trainables)
    for step in range(9):
        _, state = optimizer.update(trainables, state, trainables, value=1.0 / (step + 1))
    assert state.scale == 1


def test_the_mean_of_all_weights_is_their_mean():
    grads = [tree("float32", seed) for seed in range(1, 7)]
    path = [steps(optim.Adam(1e-2), count, grads=grads)[0] for count in (3, 4, 5, 6)]
    optimizer = optim.Average(optim.Adam(1e-2), None, start=2)
    trainables, state = steps(optimizer, 6, grads=grads)
    assert_close(
        optimizer.eval_trainables(state, trainables), jax.tree.map(lambda *leaves: sum(leaves) / 4, *path), 1e-5
    )


def test_a_rate_passed_to_update_reaches_the_optimizer_inside():
    wrapped = optim.Average(optim.ClipGlobalNorm(optim.AdamW(1e-2), 0.5))
    assert_close(steps(wrapped, rate=jnp.asarray(3e-3))[0], steps(optim.ClipGlobalNorm(optim.AdamW(3e-3), 0.5))[0])
    assert_close(steps(wrapped, limit=0.1)[0], steps(optim.ClipGlobalNorm(optim.AdamW(1e-2), 0.1))[0])


@pytest.mark.parametrize(
    "kind", [optim.LAMB, optim.LARS, optim.Adafactor, optim.Muon, optim.SOAP], ids=lambda k: k.__name__
)
def test_a_stack_of_layers_is_updated_like_its_layers(kind):
    whole, _ = steps(kind(1e-2, stacked=("stack/**",)))
    for layer in (0, 1):
        apart = [{"stack": {"kernel": tree("float32", seed)["stack"]["kernel"][layer]}} for seed in range(6)]
        alone, _ = steps(kind(1e-2), 5, apart[0], apart[1:])
        np.testing.assert_allclose(whole["stack"]["kernel"][layer], alone["stack"]["kernel"], rtol=1e-4, atol=1e-5)


def test_muon_treats_a_convolution_kernel_as_a_matrix():
    kernel = normal(6, 3, 3, 2)
    state = optim.Muon(1.0, decay=0.0, momentum=0.0, nesterov=False).init({"kernel": kernel})
    new, _ = optim.Muon(1.0, decay=0.0, momentum=0.0, nesterov=False).update(
        {"kernel": kernel}, state, {"kernel": kernel}
    )
    sizes = jnp.linalg.svd((kernel - new["kernel"]).reshape(6, -1), compute_uv=False)
    assert ((sizes > 0.6) & (sizes < 1.3)).all()


def test_gradients_are_accumulated_in_the_given_dtype():
    state = optim.Accumulate(optim.Adam(1e-2), 4).init(tree("bfloat16"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.gathered)} == {"float32"}
    state = optim.Accumulate(optim.Adam(1e-2), 4, "bfloat16").init(tree("bfloat16"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.gathered)} == {"bfloat16"}
