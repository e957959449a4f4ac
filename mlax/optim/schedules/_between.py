"""between: the way from one value to another, in one of several shapes, exact at both ends."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Fraction = jax.Array
Shape = Callable[[Fraction, Fraction], tuple[jax.Array, jax.Array]]  # fractions gone and left to weights of both ends


def linear(gone: Fraction, left: Fraction) -> tuple[jax.Array, jax.Array]:
    """A straight line."""
    return gone, left


def cosine(gone: Fraction, left: Fraction) -> tuple[jax.Array, jax.Array]:
    """Half a cosine: (1 - cos(pi * gone)) / 2, written so that nothing cancels near either end."""
    return jnp.sin(jnp.pi / 2 * gone) ** 2, jnp.sin(jnp.pi / 2 * left) ** 2


def root(gone: Fraction, left: Fraction) -> tuple[jax.Array, jax.Array]:
    """The square root of what is gone; 1 - sqrt(gone) is written so that nothing cancels."""
    return jnp.sqrt(gone), left / (1 + jnp.sqrt(gone))


def between(start: Any, end: Any, gone: jax.Array, left: jax.Array, shape: Shape = linear) -> jax.Array:
    """The value on the way from `start` to `end`, `gone` steps after its beginning and `left` steps before its end.

    Both counts, since a fraction and what it leaves of 1 are then each as exact as float32 is. Before the
    beginning it is `start` and after the end `end`, to the bit: no backend's division or sine takes part there.
    """
    behind = jnp.maximum(gone, 0).astype(jnp.float32)
    ahead = jnp.maximum(left, 0).astype(jnp.float32)
    whole = jnp.where(behind + ahead > 0, behind + ahead, 1.0)  # a way of no steps has no fractions
    of_end, of_start = shape(behind / whole, ahead / whole)
    return jnp.where(left <= 0, end, jnp.where(gone <= 0, start, start * of_start + end * of_end))
