"""Estimates, such as Sophia's of the curvature, from gradients of a loss with sampled labels."""

from typing import Any

import jax

from mlax._jax import at_least_float32, cast_scalar, leaves_with_paths
from mlax.core import Tree, check_not_donated, short_repr
from mlax.optim._slots import OptimizerState
from mlax.optim._trees import cast_like


def update_estimates(optimizer: Any, sampled: Tree, state: OptimizerState, examples: Any) -> OptimizerState:
    """The state with the slots that `optimizer.estimate_leaf` returns for each gradient in `sampled`."""
    check_not_donated(short_repr(optimizer), sampled=sampled, state=state)
    scalars = {"step", *optimizer.scalars()}
    slots = {name: getattr(state, name) for name in state._fields if name not in scalars}
    by_path = {name: dict(leaves_with_paths(slot)) for name, slot in slots.items()}
    for path, g in leaves_with_paths(sampled):
        if optimizer.is_frozen(path):
            continue
        if any(path not in leaves for leaves in by_path.values()):
            raise ValueError(
                f"{short_repr(optimizer)}: the state has no slots for the gradient at {path!r}; estimate with "
                "gradients of the trainables that it was initialized for."
            )
        g = g.astype(optimizer.policy(path).accum_dtype or at_least_float32(g.dtype))
        own = {name: leaves[path] for name, leaves in by_path.items()}
        for name, leaf in optimizer.estimate_leaf(state.step, path, g, own, cast_scalar(examples, g)).items():
            by_path[name][path] = cast_like(leaf, own[name])
    new = {name: jax.tree.structure(slots[name]).unflatten(leaves.values()) for name, leaves in by_path.items()}
    return state._replace(**new)
