"""The moving average, as every optimizer takes it."""

from typing import Any

import jax


def average(old: jax.Array, new: jax.Array, beta: Any) -> jax.Array:
    """`beta * old + (1 - beta) * new`."""
    return beta * old + (1 - beta) * new
