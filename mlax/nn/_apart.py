"""A computation that is compiled by itself wherever it stands."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, to the same bits under any jit: fused with what makes its arguments, its sums would differ.

    For `init`. A conditional whose condition XLA cannot see is never fused with what is around it.
    """

    def never(*args: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, function(*args))

    return lax.cond(lax.optimization_barrier(True), function, never, *args)
