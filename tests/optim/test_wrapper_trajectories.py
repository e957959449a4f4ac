"""Fifty steps of wrapped optimizers agree with their definitions, and only kernels decay by default."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mlax import optim
from tests.optim import definitions
from tests.optim.trajectories import (
    ALL,
    GRADS,
    TOLERANCE,
    TORCH_STEPS,
    WEIGHTS,
    assert_follows,
    stack_pairs,
    stack_steps,
    to_flat,
    to_tree,
    torch_trajectory,
    trajectory,
)

# each with decay 0.1 and the default `decayed`, and the arguments of its definition without the decay
DECAYED = {
    "adamw": (optim.AdamW(0.01, decay=0.1), {"rate": 0.01}),
    "lion": (optim.Lion(0.01, decay=0.1), {"rate": 0.01}),
    "lamb": (optim.LAMB(0.01, decay=0.1), {"rate": 0.01}),
    "adafactor": (optim.Adafactor(decay=0.1), {}),
    "soap": (optim.SOAP(0.01, decay=0.1), {"rate": 0.01}),
    "ademamix": (optim.AdEMAMix(0.01, decay=0.1), {"rate": 0.01}),
}


def norm(leaves):
    return np.sqrt(sum((leaf**2).sum() for leaf in leaves))


@pytest.mark.parametrize("case", DECAYED)
def test_only_kernels_decay(case):
    optimizer, settings = DECAYED[case]
    with_decay, without = (
        stack_steps(getattr(definitions, case)(WEIGHTS, GRADS, decay=decay, **settings)) for decay in (0.1, 0.0)
    )
    assert_follows(trajectory(optimizer), {**without, "dense/kernel": with_decay["dense/kernel"]}, 1e-9)


def test_schedule_free_decays_only_kernels():
    with_decay, without = (
        stack_pairs(definitions.schedule_free(WEIGHTS, GRADS, rate=0.01, decay=decay), 0) for decay in (0.1, 0.0)
    )
    path = trajectory(optim.ScheduleFree(0.01, decay=0.1))
    assert_follows(path, {**without, "dense/kernel": with_decay["dense/kernel"]}, 1e-9)


def test_lars_scales_kernels_and_leaves_the_rest_to_sgd():
    path = {name: leaf[TORCH_STEPS] for name, leaf in trajectory(optim.LARS(0.1)).items()}
    kernel = stack_steps(definitions.lars(WEIGHTS, GRADS, rate=0.1))["dense/kernel"][TORCH_STEPS]
    assert_follows(path, {**torch_trajectory("sgd_momentum"), "dense/kernel": kernel}, 1e-9)


def test_one_pattern_needs_no_tuple():
    sgd = optim.SGD(0.1)
    assert optim.Freeze(sgd, "a/**") == optim.Freeze(sgd, ("a/**",))
    assert optim.Decay(sgd, decayed="**/kernel").decayed == ("**/kernel",)
    assert optim.AdamW(0.1, decayed="**", stacked="blocks/**") == optim.AdamW(
        0.1, decayed=("**",), stacked=("blocks/**",)
    )
    assert optim.LayerwiseRates(sgd, "blocks/**", stacked="blocks/**").layers == ("blocks/**",)


def test_decay_subtracts_the_same_part_of_the_weights_at_any_rate():
    path = trajectory(optim.Decay(optim.Adam(0.01), 0.02, decayed=ALL))
    assert_follows(path, stack_steps(definitions.adamw(WEIGHTS, GRADS, rate=0.01, decay=0.02 / 0.01)), 1e-9)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_each_leaf_is_clipped_by_its_own_norm(dtype):
    grads = [{name: g * min(1.0, 0.5 / max(norm([g]), 1e-300)) for name, g in step.items()} for step in GRADS]
    reference = stack_steps(definitions.adamw(WEIGHTS, grads, rate=0.01))
    assert_follows(trajectory(optim.ClipNorm(optim.Adam(0.01), 0.5), dtype), reference, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_all_leaves_are_clipped_by_one_norm(dtype):
    optimizer = optim.ClipGlobalNorm(optim.Adam(0.01), 1.0)
    grads = [{name: g * min(1.0, 1.0 / norm(step.values())) for name, g in step.items()} for step in GRADS]
    path = trajectory(optimizer, dtype)
    assert_follows(path, stack_steps(definitions.adamw(WEIGHTS, grads, rate=0.01)), TOLERANCE[dtype])
    # PyTorch divides by the norm and 1e-6
    assert_follows(
        {name: leaf[TORCH_STEPS] for name, leaf in path.items()},
        torch_trajectory("clip_global"),
        max(TOLERANCE[dtype], 1e-6),
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_each_output_is_clipped_by_its_weights(dtype):
    path = trajectory(optim.ClipAdaptive(optim.SGD(0.1), limit=0.05), dtype)
    assert_follows(
        path, stack_steps(definitions.adaptively_clipped_sgd(WEIGHTS, GRADS, rate=0.1, limit=0.05)), TOLERANCE[dtype]
    )


def test_an_update_after_five_accumulated_gradients_uses_their_mean():
    path = trajectory(optim.Accumulate(optim.Adam(0.01), 5))
    means = [{name: np.mean([g[name] for g in GRADS[i : i + 5]], axis=0) for name in WEIGHTS} for i in range(0, 50, 5)]
    reference = [WEIGHTS, *definitions.adamw(WEIGHTS, means, rate=0.01)]
    assert_follows(path, stack_steps([reference[(step + 1) // 5] for step in range(50)]), 1e-9)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_average_averages_and_does_not_change_the_trajectory(dtype):
    path, averaged = trajectory(optim.Average(optim.Adam(0.01), decay=0.9), dtype, averaged=True)
    reference = definitions.adamw(WEIGHTS, GRADS, rate=0.01)
    assert_follows(path, stack_steps(reference), TOLERANCE[dtype])
    assert_follows(averaged, stack_steps(definitions.averages(WEIGHTS, reference, decay=0.9)), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_lookahead_moves_halfway_to_the_fast_weights(dtype):
    fast, slow = trajectory(optim.Lookahead(optim.SGD(0.1)), dtype, averaged=True)
    reference = definitions.lookahead_sgd(WEIGHTS, GRADS, rate=0.1)
    assert_follows(fast, stack_pairs(reference, 0), TOLERANCE[dtype])
    assert_follows(slow, stack_pairs(reference, 1), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sam_uses_the_gradient_at_the_perturbed_weights(dtype):
    optimizer = optim.SAM(optim.SGD(0.1), radius=0.3)

    def loss(trainables):
        return sum(jnp.sum(leaf**2 / 2 + leaf**4 / 4) for leaf in jax.tree.leaves(trainables))

    def step(carry, _):
        trainables, state = optimizer.update(jax.grad(loss)(carry[0]), carry[1], carry[0], loss=loss)
        return (trainables, state), trainables

    with jax.enable_x64(dtype == "float64"):
        trainables = to_tree(WEIGHTS, dtype)
        _, path = lax.scan(step, (trainables, optimizer.init(trainables)), length=20)
        path = to_flat(path)
    reference = definitions.sam_sgd(
        WEIGHTS, lambda weights: {name: w + w**3 for name, w in weights.items()}, steps=20, rate=0.1, radius=0.3
    )
    assert_follows(path, stack_steps(reference), TOLERANCE[dtype])
