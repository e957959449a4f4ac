"""SophiaG in a step: its curvature is estimated from labels that are sampled from the model's predictions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mlax
from mlax import nn, optim, train
from mlax.train import count_labels
from tests.asserts import assert_close, unequal_leaves
from tests.train.tasks import batch

MODEL = mlax.Series(up=nn.Linear(8), tanh=mlax.F(jnp.tanh), head=nn.Linear(3))
RNG = jax.random.key(1)
SOPHIA = optim.SophiaG(0.01, gamma=0.05, every=2)


def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
    logits, new = MODEL.fwd(batch["x"], trainables, non_trainables)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]), new


def sampled(batch, trainables, non_trainables, rng=None, inference_mode=False):
    logits, new = MODEL.fwd(batch["x"], trainables, non_trainables)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jax.random.categorical(rng, logits)), new


def run(optimizer, steps=4, change=lambda number, batch: batch, **options):
    """The curvature after each step, and the last state."""
    step = train.step(objective, optimizer, sampled=sampled, **options)
    state = step.init(RNG, *MODEL.init(jax.random.key(0), batch()["x"]))
    seen = [jax.tree.map(np.asarray, state.optimizer.curvature)]
    for number in range(steps):
        state, _ = step(state, change(number, batch(seed=number)))
        seen.append(jax.tree.map(np.asarray, state.optimizer.curvature))
    return seen, state


def test_a_step_estimates_the_curvature_when_it_is_due():
    seen, state = run(SOPHIA)
    trainables, _ = MODEL.init(jax.random.key(0), batch()["x"])
    slots = SOPHIA.init(trainables)
    for number in range(4):
        key = mlax.core.named_key(jax.random.fold_in(RNG, number), "sampled")
        given = batch(seed=number)
        if number % 2 == 0:
            grads = jax.grad(lambda w: jnp.mean(sampled(given, w, None, rng=key)[0]))(trainables)
            slots = SOPHIA.estimate(grads, slots, 8)
        grads = jax.grad(lambda w: jnp.mean(objective(given, w, None)[0]))(trainables)
        trainables, slots = SOPHIA.update(grads, slots, trainables)
        assert_close(seen[number + 1], slots.curvature, 1e-4, 1e-8)
    assert_close(state.trainables, trainables, 1e-4, 1e-6)
    assert (
        unequal_leaves(seen[1], seen[0]) and not unequal_leaves(seen[2], seen[1]) and unequal_leaves(seen[3], seen[2])
    )


def test_labels_are_counted_without_padding():
    def count(shape, mask=None):
        given = {"x": jnp.ones((4, 3)), **({} if mask is None else {"mask": mask})}
        return float(count_labels(lambda batch, w, state, rng: (jnp.zeros(shape), None), given, None, None, RNG))

    mask = jnp.arange(4) < 3
    assert [count(()), count((4,)), count((4, 5))] == [4, 4, 20]
    assert [count((), mask), count((4,), mask), count((4, 5), mask)] == [3, 3, 15]
    assert count((4, 3), jnp.ones((4, 3), bool).at[0, 0].set(False)) == 11


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.ClipGlobalNorm(optim.Freeze(SOPHIA, "up/**"), 1.0),
        optim.Groups(("head/**", SOPHIA), ("**", optim.SGD(0.1))),
        optim.Accumulate(SOPHIA, 2),
    ],
)
def test_the_estimate_reaches_sophia_inside_of_wrappers(optimizer):
    seen, _ = run(optimizer, 3, accumulate=2)
    due = [bool(unequal_leaves(after, before)) for before, after in itertools.pairwise(seen)]
    assert due == ([True, False, False] if isinstance(optimizer, optim.Accumulate) else [True, False, True])
    if not isinstance(optimizer, optim.Accumulate):
        assert seen[-1]["up"]["kernel"].size == 0 and (seen[-1]["head"]["kernel"] > 0).any()


def test_a_step_that_is_not_finite_estimates_nothing():
    seen, state = run(SOPHIA, 1, change=lambda number, batch: {**batch, "x": batch["x"] * jnp.nan})
    assert int(state.skipped) == 1 and not unequal_leaves(seen[1], seen[0])


def test_sophia_without_sampled_labels_is_refused_and_sampled_labels_without_sophia_are_too():
    with pytest.raises(TypeError, match=r"SophiaG.*estimates the curvature.*pass sampled=.*categorical"):
        train.step(objective, optim.ClipGlobalNorm(SOPHIA, 1.0))
    with pytest.raises(ValueError, match=r"SGD\(0\.1\) does not; leave it out"):
        train.step(objective, optim.SGD(0.1), sampled=sampled)
    with pytest.raises(ValueError, match="no slots for the gradient at 'b'"):
        SOPHIA.estimate({"b": jnp.ones(2)}, SOPHIA.init({"kernel": jnp.ones((2, 2))}), 8)
