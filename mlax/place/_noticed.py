"""Whether a model that is traced for a plan computes as the plan says."""

import contextlib
import contextvars
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from mlax.place._rules import mesh_axes

if TYPE_CHECKING:
    from mlax.place._plan import Plan

_met: contextvars.ContextVar[list[bool] | None] = contextvars.ContextVar("met", default=None)


def mark_wired() -> None:
    """Note that a part of what is traced was wired for a mesh."""
    if (met := _met.get()) is not None:
        met.append(True)


@contextlib.contextmanager
def traced_for(plan: "Plan", variables: Any) -> Iterator[None]:
    """Trace what is within over the plan's mesh; warn if the plan speaks of the model's parts, but none is wired."""
    token = _met.set([])
    try:
        with jax.set_mesh(plan.mesh):
            yield
        if not _met.get() and _has_to_say(plan, variables):
            warnings.warn(
                f"{plan} says how parts of a model are to be computed, but none of those of the objective's model is "
                "computed so; let it call plan.parallelize(model, x), or more is moved and computed than need be.",
                stacklevel=2,
            )
    finally:
        _met.reset(token)


def _has_to_say(plan: "Plan", variables: Any) -> bool:
    if plan.mesh.size == 1:
        return False
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(variables) if isinstance(leaf.sharding, NamedSharding)]
    split = {name for spec in specs for entry in spec for name in mesh_axes(entry)}
    return bool(plan.activations.lists) or not split.isdisjoint({*plan.all_gather, *plan.all_to_all})
