"""Rotary embeddings for the JAX peers, which have none that pairs halves for all heads at once."""

import jax.numpy as jnp
import numpy as np


def apply_rotary(x):
    """Rotate x (..., t, h, k), feature i paired with i + k / 2."""
    t, k = x.shape[-3], x.shape[-1]
    angles = np.arange(t)[:, None, None] * 10_000.0 ** (-np.arange(0, k, 2) / k)  # (t, 1, k / 2)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
