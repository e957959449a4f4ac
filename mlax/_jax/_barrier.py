"""A barrier across which XLA fuses nothing on a CPU."""

from typing import Any

import jax
from jax import lax


def fusion_barrier(tree: Any) -> Any:
    """The identity, across which XLA fuses nothing on a CPU, in the forward and the backward pass.

    Some versions of XLA drop a bare `optimization_barrier`, but never a conditional whose predicate is opaque, and
    that copies nothing. On other devices fusion helps.
    """

    def barrier(tree: Any) -> Any:  # leaf by leaf: inside shard_map, all operands of one barrier vary if one does
        return jax.tree.map(lax.optimization_barrier, tree)

    def on_cpu(tree: Any) -> Any:
        return lax.cond(lax.optimization_barrier(False), barrier, lambda tree: tree, tree)

    return lax.platform_dependent(tree, cpu=on_cpu, default=lambda tree: tree)
