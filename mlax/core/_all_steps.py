"""A function of one time step over all of them at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mlax.core._fence import fenced
from mlax.core._laid import whole_on_cpu


def over_all_steps(function: Callable[[Any], Any], value: Any) -> Any:
    """`jax.vmap(function)(value)`, where `function` treats each example of its batch alike.

    Then time can be merged with the batch, (t, b, ...) to (t b, ...), and on a CPU that is faster: XLA copies the
    operands of a product that sums over two axes, as a kernel's gradient would. Elsewhere, and where an axis is or
    may be sharded, it is mapped. So are keys, of which each step has its own, and whatever else is not a batch.
    """
    leaves = jax.tree.leaves(value)
    sizes = {leaf.shape[:2] for leaf in leaves}
    if len(sizes) != 1 or not all(map(_mergeable, leaves)):
        return jax.vmap(function)(value)
    times, batch = sizes.pop()
    y = function(jax.tree.map(lambda leaf: leaf.reshape(times * batch, *leaf.shape[2:]), value))
    y = fenced(y)  # XLA adds a bias in place, but fused with the reshape, into a second array as large
    return jax.tree.map(lambda leaf: leaf.reshape(times, batch, *leaf.shape[1:]), y)


def _mergeable(leaf: jax.Array) -> bool:
    return leaf.ndim >= 2 and jnp.issubdtype(leaf.dtype, jnp.floating) and whole_on_cpu(leaf)
