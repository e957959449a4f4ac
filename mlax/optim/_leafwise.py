"""Leafwise: an optimizer that its author defines by the update of one leaf."""

import abc
import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from mlax._jax import widest_dtype
from mlax.core import DType, frozen
from mlax.optim._base import Optimizer, StepResult
from mlax.optim._hyperparams import (
    Hyperparams,
    Patterns,
    SlotDTypes,
    check_decayed,
    matches_any,
    with_auto_axes_at,
)
from mlax.optim._rounding import LeafPolicy, Rounding, RoundToNearest
from mlax.optim._slots import Slot
from mlax.optim._stacks import broadcast_over_layers, count_stacked_axes, layer_shape, map_layers_of, stack_slot

SMALL = 2**16  # elements of a leaf that a GPU updates in less time than it takes to launch a kernel


@frozen
class Leafwise(Optimizer):
    """An optimizer defined by the slots of one leaf, `leaf_slots`, and the update of one leaf, `leaf_update`.

    The update is computed in `accum_dtype`; None is the dtype of the weights, or float32 if that is narrower. Slots are
    stored in the dtype of the weights; those that change too slowly for a narrow dtype, such as mean squares, in the
    compute dtype; or as `slot_dtypes` says: `(("mean", "float32"),)`. `rounding` is how narrow weights are stored.
    Algorithms that use whole leaves treat each layer of a stack as a leaf: paths say which leaves of `Repeat` and of
    experts are stacks (`mlax.stacked_axes`), and the patterns `stacked` name those that were stacked by hand, by
    `jax.vmap` of `init` say.

    For authors: set `elementwise = True` if each element is updated independently of the others, so that leaves in host
    memory are updated in chunks. Three field names have a meaning: wrappers such as `Rates` scale `rate`, and `decay`
    is 0 for leaves that do not match the patterns `decayed`. `shared_values` returns the new value of every scalar.
    """

    accum_dtype: DType = dataclasses.field(default=None, kw_only=True)  # of the update; None: at least float32
    slot_dtypes: SlotDTypes = dataclasses.field(default=(), kw_only=True)  # such as (("mean", "float32"),)
    rounding: Rounding = dataclasses.field(default=RoundToNearest(), kw_only=True)  # how narrow weights are stored
    stacked: Patterns = dataclasses.field(default=(), kw_only=True)  # patterns of leaves that were stacked by hand

    @abc.abstractmethod
    def leaf_slots(self, path: str, w: Any) -> dict[str, Slot]:
        """The slots of one leaf."""

    @abc.abstractmethod
    def leaf_update(
        self, now: Hyperparams, g: jax.Array, w: jax.Array, slots: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The new weights and slots of one leaf. `now` has the hyperparameters at this step, such as `now.rate`."""

    def shared_values(self, now: Hyperparams, scalars: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The new value of every scalar, and other values that all leaves share, as attributes of `now`."""
        return {}

    def policy(self, path):
        return LeafPolicy(self.accum_dtype, self.slot_dtypes, self.rounding)

    def patterns(self):
        return (*self.stacked, *(getattr(self, "decayed", None) or ()))

    def check_paths(self, paths):
        super().check_paths(paths)
        if hasattr(self, "decayed"):
            check_decayed(self, paths)

    def slots(self, path, w):
        axes = self._layer_axes(path)
        return {name: stack_slot(slot, axes) for name, slot in self.leaf_slots(path, layer_shape(w, axes)).items()}

    def is_chunkable(self, path):
        return self.elementwise or self._layer_axes(path) > 0

    def update_leaves(self, context, grads, weights, slots):
        values = context.hyperparams(self)
        dtype = widest_dtype(g.dtype for g in grads.values())
        scalars = {name: slots[name] for name in self.scalars()}
        shared = self.shared_values(Hyperparams(context.step, values, dtype=dtype), scalars)
        values |= shared
        without_decay = {**values, "decay": 0.0} if "decay" in values else values
        sharing = _leaves_to_update_together(grads)
        new: dict[str, jax.Array] = {}
        new_slots: dict[str, Any] = {name: {} for name in slots if isinstance(slots[name], Mapping)}
        for path, g in grads.items():
            here = values if self._is_decayed(path) else without_decay
            now = Hyperparams(context.step, here, path, g.dtype, context.rate_factors.get(path), path in sharing)
            own = {name: slots[name][path] for name in self.slots(path, weights[path])}
            with jax.named_scope(path):
                new[path], own = self._update_layers(now, g, weights[path], own) if g.size else (weights[path], own)
            for name, leaf in own.items():
                new_slots[name][path] = leaf
        return StepResult(new, {"step": slots["step"], **{name: shared[name] for name in scalars}, **new_slots})

    def _update_layers(self, now: Hyperparams, g: Any, w: Any, slots: dict[str, Any]) -> Any:
        """`leaf_update` of a leaf, or of each layer of a stack."""
        axes = self._layer_axes(now.path)
        if not axes:
            return self.leaf_update(now, g, w, slots)
        factor = None if now.rate_factor is None else broadcast_over_layers(now.rate_factor, g, axes)

        def update_stack(now: Hyperparams, *leaves: Any) -> Any:
            def one(rate_factor: Any, g: Any, w: Any, slots: Any) -> Any:
                return self.leaf_update(dataclasses.replace(now, rate_factor=rate_factor), g, w, slots)

            return map_layers_of(one, axes)(*leaves)

        # on explicit mesh axes, JAX would need the sharding of the layers in every operation
        return with_auto_axes_at(now, update_stack, factor, g, w, slots, like=(w, slots))

    def _layer_axes(self, path: str) -> int:
        """The leading axes of a leaf over which updates are mapped: none if they are elementwise."""
        return 0 if self.elementwise else count_stacked_axes(self.stacked, path)

    def _is_decayed(self, path: str) -> bool:
        return matches_any(getattr(self, "decayed", ("**",)), path)


def _leaves_to_update_together(grads: Mapping[str, jax.Array]) -> set[str]:
    """The leaves that may be updated by one kernel with others of their size.

    Not large ones of equal sizes: 12 of them at a time do not fit into the registers of a GPU.
    """
    number = collections.Counter(g.size for g in grads.values())
    return {path for path, g in grads.items() if g.size <= SMALL or number[g.size] == 1}
