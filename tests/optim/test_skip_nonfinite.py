"""`update(skip_nonfinite=True)` changes nothing if a weight would not be finite, in as few passes as it can."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import optim
from tests.asserts import unequal_leaves
from tests.catalogue.optimizers import tree

BOUNDED = [
    optim.AdamW(1e-2),
    optim.Adam(optim.WarmupCosine(1e-2, warmup=2, total=9)),
    optim.ClipGlobalNorm(optim.Average(optim.AdamW(1e-2)), 1.0),
    optim.Groups(("**/kernel", optim.AdamW(1e-2)), ("**", optim.Adam(1e-3))),
]
CHECKED = [optim.SGD(0.1), optim.LAMB(1e-2), optim.SAM(optim.AdamW(1e-2)), optim.SkipNonFinite(optim.AdamW(1e-2))]


def update(optimizer, grads, trainables, state=None, **numbers):
    state = optimizer.init(trainables) if state is None else state
    return jax.jit(optimizer.update, static_argnames=("skip_nonfinite", "loss"))(
        grads, state, trainables, skip_nonfinite=True, loss=_loss, **numbers
    )


def _loss(trainables):
    return sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(trainables))


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, 1e30])
@pytest.mark.parametrize("optimizer", BOUNDED, ids=repr)
def test_a_gradient_whose_norm_is_not_finite_changes_nothing(optimizer, value):
    trainables, grads = tree("float32"), tree("float32", 1)
    grads["dense"]["kernel"] = grads["dense"]["kernel"].at[0, 0].set(value)
    state = optimizer.init(trainables)
    assert not unequal_leaves(update(optimizer, grads, trainables, state), (trainables, state))


def test_a_rate_that_is_out_of_reason_changes_nothing():
    optimizer, trainables = optim.AdamW(1e-2), tree("float32")
    state = optimizer.init(trainables)
    new, same = (update(optimizer, tree("float32", 1), trainables, state, rate=jnp.float32(r)) for r in (1e-2, 1e30))
    assert not unequal_leaves(same, (trainables, state)) and new[1].step == 1


def test_a_weight_that_overflows_all_the_same_stays_as_it_is():
    trainables = {"kernel": jnp.asarray([1.0, -3.4e38])}
    new, state = update(optim.AdamW(0.1, decay=1e3), {"kernel": jnp.ones(2)}, trainables)
    assert new["kernel"][1] == trainables["kernel"][1] and new["kernel"][0] != 1 and state.step == 1


@pytest.mark.parametrize(("dtype", "skipped"), [("float16", True), ("bfloat16", False)])
def test_weights_of_a_dtype_with_a_small_range_are_checked_before_they_are_stored(dtype, skipped):
    trainables = {"kernel": jnp.asarray([65504.0, 1.0], dtype), "bias": jnp.ones(2, dtype)}
    grads = jax.tree.map(lambda w: -jnp.ones_like(w), trainables)
    _, state = update(optim.AdamW(1e3), grads, trainables)
    assert state.step == (0 if skipped else 1)


@pytest.mark.parametrize("optimizer", [*BOUNDED, *CHECKED], ids=repr)
def test_only_optimizers_whose_steps_are_not_bounded_reduce_over_new_weights(optimizer):
    trainables = tree("float32")
    text = str(
        jax.make_jaxpr(lambda g, s, w: optimizer.update(g, s, w, skip_nonfinite=True, loss=_loss))(
            trainables, optimizer.init(trainables), trainables
        )
    )
    assert bool(re.search("reduce_and", text)) == (optimizer in CHECKED)


@pytest.mark.parametrize("optimizer", BOUNDED, ids=repr)
def test_finite_steps_are_the_same_as_without_the_check(optimizer):
    trainables, grads = tree("float32"), tree("float32", 1)
    state = optimizer.init(trainables)
    plain = jax.jit(optimizer.update)(grads, state, trainables)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), update(optimizer, grads, trainables, state), plain
    )


@pytest.mark.parametrize("optimizer", [optim.AdamW(1e-2), optim.SGD(0.1, momentum=0.9), optim.Adafactor(0.1)], ids=repr)
def test_the_form_for_a_gpu_computes_the_same(optimizer, monkeypatch):
    """There a select of each element skips an update, and not a conditional."""
    trainables, grads = tree("float32"), tree("float32", 1)
    wanted = update(optimizer, grads, trainables)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    state = optimizer.init(trainables)
    found = optimizer.update(grads, state, trainables, skip_nonfinite=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, wanted)
