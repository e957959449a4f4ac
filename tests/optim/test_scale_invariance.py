"""Optimizers that normalize gradients take the same steps for gradients of any scale, as far as their eps allows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mlax import optim
from tests.arrays import normal

NORMALIZING = {
    "Adafactor": optim.Adafactor(1e-2),
    "Adafactor unfactored": optim.Adafactor(1e-2, min_dim_size_to_factor=99),
    "Adafactor, eps in the paper's units": optim.Adafactor(1e-2, eps=1e-30),
    "Muon": optim.Muon(1e-2, decay=0.0),
    "SignSGD": optim.SignSGD(1e-2),
    "LARS": optim.LARS(1.0, decay=0.0, decayed="**"),
    "RMSProp": optim.RMSProp(1e-2, eps=1e-15),
}


def direction(optimizer, scale):
    """The sum of three steps."""
    w = {"kernel": normal(6, 4)}
    state, new = optimizer.init(w), w
    for seed in (1, 2, 3):
        new, state = optimizer.update({"kernel": normal(6, 4, seed=seed) * scale}, state, new)
    return np.asarray(new["kernel"] - w["kernel"]).ravel()


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.mark.parametrize("name", NORMALIZING)
def test_the_step_of_small_gradients_is_not_turned(name):
    unscaled = direction(NORMALIZING[name], 1.0)
    for scale in (1e3, 1e-6, 1e-9):
        assert cosine(direction(NORMALIZING[name], scale), unscaled) > 0.99999, scale


def test_adafactor_keeps_as_close_to_its_direction_as_optax_does():
    def run(scale):
        optimizer, w = optax.adafactor(1e-2, min_dim_size_to_factor=1), {"kernel": normal(6, 4)}
        updates, _ = optimizer.update({"kernel": normal(6, 4, seed=1) * scale}, optimizer.init(w), w)
        return np.asarray(updates["kernel"]).ravel()

    ours = [direction(optim.Adafactor(1e-2), scale) for scale in (1.0, 1e-6)]
    assert abs(cosine(*ours) - cosine(run(1.0), run(1e-6))) < 1e-5


@pytest.mark.parametrize("optimizer", [optim.Adafactor(eps=0.0), optim.Adafactor(accum_dtype="float16"), optim.Muon()])
def test_a_gradient_of_zeros_gives_a_finite_step(optimizer):
    dtype = optimizer.accum_dtype or "float32"
    w = {"kernel": jnp.ones((3, 2), dtype), "bias": jnp.ones(2, dtype)}
    new, _ = optimizer.update(jax.tree.map(jnp.zeros_like, w), optimizer.init(w), w)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))
