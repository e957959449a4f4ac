"""Dependences without an effect on values: a barrier against fusion on a CPU, and updates in place on a GPU."""

import collections
import itertools
from collections.abc import Mapping
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


def share_buffers(new: Mapping[str, jax.Array], old: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """`new`, each elementwise in `old`, such that XLA can write any of them over any of `old` if these are donated.

    JAX pairs donated arguments with results of the same shape and dtype in the order of both, so that new weights may
    get the buffer of old means. One kernel reads an element of all and writes it to all, in whatever order; but on a
    GPU, XLA writes a result only over what that result depends on, and copies the others. So each of `new` is made to
    depend on all of `old` of its shape and dtype, by a condition that never holds: `a < b`, `b < c` and `c < a`.
    """
    groups: dict[Any, list[str]] = collections.defaultdict(list)
    for name, leaf in old.items():
        groups[leaf.shape, leaf.dtype].append(name)
    shared = dict(new)
    for names in groups.values():
        arrays = [old[name] for name in names]
        if len(arrays) == 1:
            continue
        is_cycle = lax.lt(arrays[-1], arrays[0])
        for one, following in itertools.pairwise(arrays):
            is_cycle = is_cycle & lax.lt(one, following)
        for name in names:
            if new[name] is not old[name]:
                shared[name] = lax.select(is_cycle, old[name], new[name])
    return shared
