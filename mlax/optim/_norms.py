"""Norms of leaves, and their ratio as layer-wise rates take it."""

import jax
import jax.numpy as jnp
from jax import lax


def norm(x: jax.Array) -> jax.Array:
    """The root of the sum of squares."""
    return lax.sqrt(jnp.sum(x * x, dtype=x.dtype))


def ratio(above: jax.Array, below: jax.Array, added: jax.Array | float = 0.0) -> jax.Array:
    """`above / (below + added)`, and 1 where one of the first two is zero."""
    usable = (above > 0) & (below > 0)
    return jnp.where(usable, above / jnp.where(usable, below + added, jnp.ones_like(below)), jnp.ones_like(above))
