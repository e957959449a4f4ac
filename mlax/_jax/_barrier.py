"""A barrier across which XLA fuses nothing on a CPU."""

from typing import Any

import jax
from jax import lax


def fusion_barrier(tree: Any) -> Any:
    """The same tree; on a CPU, XLA fuses nothing across it, forward or backward.

    XLA drops a bare `optimization_barrier` in some versions, but never a conditional whose condition it cannot see,
    and that copies nothing. On other devices fusion is welcome.
    """

    def barred(tree: Any) -> Any:  # leaf by leaf: all that pass one barrier vary inside of shard_map where one does
        return jax.tree.map(lax.optimization_barrier, tree)

    def on_cpu(tree: Any) -> Any:
        return lax.cond(lax.optimization_barrier(False), barred, lambda tree: tree, tree)

    return lax.platform_dependent(tree, cpu=on_cpu, default=lambda tree: tree)
