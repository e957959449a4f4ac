"""Random arrays that the tests share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape: int, seed: int = 0, mean: float = 0.0, std: float = 1.0, dtype: Any = "float32") -> jax.Array:
    """Draws from a normal distribution, the same ones for the same seed."""
    return jnp.asarray(np.random.default_rng(seed).normal(mean, std, shape), dtype)


def normals(*shapes, dtype="float32"):
    """Arrays of these shapes, each with a seed of its own."""
    return [normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
