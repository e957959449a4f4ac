"""What is computed over all leaves at once."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mlax.optim._wide import widest


def global_norm(leaves: Mapping[str, jax.Array]) -> jax.Array:
    """The root of the sum of all squares, in the widest dtype that occurs."""
    return jnp.sqrt(inner(leaves, leaves))


def inner(a: Mapping[str, jax.Array], b: Mapping[str, jax.Array]) -> jax.Array:
    """The sum of the products, in the widest dtype that occurs, and in no narrower one than float32."""
    wide = widest(leaf.dtype for leaf in a.values())
    total = jnp.zeros((), wide)
    for path, leaf in a.items():
        total = total + jnp.sum(leaf.astype(wide) * b[path].astype(wide))
    return total


def all_finite(leaves: Mapping[str, jax.Array]) -> jax.Array:
    """Whether every number is finite."""
    found = jnp.asarray(True)
    for leaf in leaves.values():
        found = found & jnp.all(jnp.isfinite(leaf))
    return found


def scalar(number: Any, like: jax.Array) -> jax.Array:
    """A number in the dtype of a leaf."""
    return jnp.asarray(number).astype(like.dtype)
