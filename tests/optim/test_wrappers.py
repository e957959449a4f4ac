"""Wrappers of optimizers do what they say and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import optim
from mlax.optim import train_only
from tests.arrays import normal
from tests.asserts import assert_close, unequal_leaves
from tests.catalogue.optimizers import loss, tree


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
    several, _ = steps(optim.Groups((("**/kernel", "!dense/*"), optim.SGD(0.1)), ("**", optim.SGD(0.0))))
    jax.tree.map(np.testing.assert_array_equal, several, found)
    before = tree("float32")
    np.testing.assert_array_equal(found["dense"]["kernel"], before["dense"]["kernel"])
    assert (found["stack"]["kernel"] != before["stack"]["kernel"]).all()


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.Freeze(optim.SGD(0.1), "!dense/*"),
        optim.Freeze(optim.SGD(0.1), ("**", "!dense/*")),
        train_only(optim.SGD(0.1), ("dense/*",)),
        optim.Rates(optim.SGD(0.1), (("!dense/*", 0.0),)),
        optim.Decay(optim.SGD(0.0), 0.1, decayed=("**", "!s*/**", "!temperature")),
        optim.AdamW(0.1, decay=0.1, decayed="dense/*", b1=0.0, b2=0.0, eps=1e30),
    ],
    ids=repr,
)
def test_patterns_of_optimizers_leave_out_what_follows_an_exclamation_mark(optimizer):
    before = tree("float32")
    after, _ = optimizer.update(before, optimizer.init(before), before)
    changed = {name for name in before if unequal_leaves(after[name], before[name])}
    assert changed == {"dense"}


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


@pytest.mark.parametrize("first", [True, False])
def test_a_group_that_skips_a_step_holds_back_no_other_group(first):
    """A NaN in the gradients of one group: its optimizer has made two steps, the other one three."""
    skipping, other = ("dense/*", optim.SkipNonFinite(optim.NAdam(1e-2))), ("**", optim.NAdam(1e-2))
    groups = (skipping, other) if first else (("stack/*", other[1]), ("temperature", other[1]), skipping)
    bad = tree("float32", 2)
    bad = {**bad, "dense": jax.tree.map(lambda g: g * jnp.nan, bad["dense"])}
    grads = [tree("float32", 1), bad, tree("float32", 3)]
    found, state = steps(optim.Groups(*groups), 3, grads=grads)
    twice, _ = steps(optim.NAdam(1e-2), 2, grads=[grads[0], grads[2]])
    thrice, _ = steps(optim.NAdam(1e-2), 3, grads=grads)
    assert state.step == 3 and state.skipped == 1
    assert_close(found, {**thrice, "dense": twice["dense"]})


def test_a_skipped_step_inside_accumulate_does_not_count_for_the_optimizer_inside():
    bad = jax.tree.map(lambda g: g * jnp.nan, tree("float32", 9))
    grads = [tree("float32", 1), bad, tree("float32", 2)]
    found, state = steps(optim.Accumulate(optim.SkipNonFinite(optim.NAdam(1e-2)), 1), 3, grads=grads)
    wanted, _ = steps(optim.NAdam(1e-2), 2, grads=[grads[0], grads[2]])
    assert state.step == 3 and state.skipped == 1
    assert_close(found, wanted)


def test_scalars_and_slots_of_groups_have_names_of_their_own():
    """Scalars `product` of three groups, two of them nested; slot `largest` beside the largest rate."""
    slow, fast, free, largest = (
        optim.NAdam(1e-3, b1=0.5),
        optim.NAdam(1e-2),
        optim.ScheduleFree(1e-2),
        optim.AMSGrad(1e-2),
    )
    pair = optim.Groups(("dense/kernel", slow), ("**", fast))
    found, _ = steps(optim.Groups(("dense/*", pair), ("temperature", slow), ("**", fast)))
    assert_close(found["dense"], {"kernel": steps(slow)[0]["dense"]["kernel"], "bias": steps(fast)[0]["dense"]["bias"]})
    assert_close(found["temperature"], steps(slow)[0]["temperature"])
    found, _ = steps(optim.Groups(("dense/*", largest), ("**", free)))
    assert_close(found, {**steps(free)[0], "dense": steps(largest)[0]["dense"]})


def test_line_search_moves_only_the_leaves_of_its_group():
    optimizer = optim.Groups(("**/kernel", optim.LBFGS()), ("**", optim.SGD(0.0)))
    trainables = tree("float32")
    state = optimizer.init(trainables)
    values = []
    for _ in range(3):
        value, grads = jax.value_and_grad(loss)(trainables)
        trainables, state = optimizer.update(grads, state, trainables, value=float(value), loss=loss)
        values.append(float(value))
    assert (np.diff(values) <= 0).all() and values[-1] < values[0]
    np.testing.assert_array_equal(trainables["dense"]["bias"], tree("float32")["dense"]["bias"])


def test_a_bare_array_is_matched_by_two_stars():
    array = jnp.ones(3)
    found, _ = steps(optim.Groups(("**", optim.AdamW(0.1, decayed="**"))), 1, array, [array])
    assert (found < 1).all()
    np.testing.assert_array_equal(steps(optim.Freeze(optim.SGD(0.1), "**"), 1, array, [array])[0], array)


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


def torch_plateau(values, factor, patience, threshold, cooldown):
    """The factors of PyTorch's ReduceLROnPlateau after each value."""
    best, bad, cooling, scale, scales = np.inf, 0, 0, 1.0, []
    for value in values:
        better = value < best * (1 - threshold)
        best, bad = (value, 0) if better else (best, bad + 1)
        if cooling > 0:
            cooling, bad = cooling - 1, 0
        if bad > patience:
            scale, cooling, bad = scale * factor, cooldown, 0
        scales.append(scale)
    return scales


@pytest.mark.parametrize("cooldown", [0, 1, 5])
def test_a_plateau_cools_down_as_in_pytorch_while_the_loss_falls_or_not(cooldown):
    values = np.float32(3 - np.cumsum(np.random.default_rng(cooldown).choice([0.0, 0.05], 60, p=[0.8, 0.2])))
    optimizer = optim.Plateau(optim.SGD(1.0), factor=0.5, patience=2, cooldown=cooldown)
    trainables = {"w": jnp.zeros(())}

    def step(state, value):
        state = optimizer.update(trainables, state, trainables, value=value)[1]
        return state, state.scale

    _, scales = jax.lax.scan(step, optimizer.init(trainables), jnp.asarray(values))
    assert scales[-1] < 0.2
    np.testing.assert_array_equal(scales, torch_plateau(values, 0.5, 2, 1e-4, cooldown))


def test_a_plateau_of_a_negative_loss_is_noticed():
    optimizer, trainables = optim.Plateau(optim.SGD(1.0), patience=1), {"w": jnp.zeros(())}
    state = optimizer.init(trainables)
    for _ in range(4):
        _, state = optimizer.update(trainables, state, trainables, value=-2.0)
    assert state.scale < 1


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


def test_muon_treats_a_convolution_kernel_as_a_matrix_if_told():
    kernel = normal(6, 3, 3, 2)
    optimizer = optim.Muon(1.0, decay=0.0, momentum=0.0, nesterov=False, matrices="kernel")
    new, _ = optimizer.update({"kernel": kernel}, optimizer.init({"kernel": kernel}), {"kernel": kernel})
    sizes = jnp.linalg.svd((kernel - new["kernel"]).reshape(6, -1), compute_uv=False)
    assert ((sizes > 0.6) & (sizes < 1.3)).all()


def test_gradients_are_accumulated_in_the_given_dtype():
    state = optim.Accumulate(optim.Adam(1e-2), 4).init(tree("bfloat16"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.gathered)} == {"float32"}
    state = optim.Accumulate(optim.Adam(1e-2), 4, "bfloat16").init(tree("bfloat16"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.gathered)} == {"bfloat16"}
