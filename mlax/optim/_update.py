"""The update of leaves in device memory, and UpdateContext: what optimizers know of it besides the arrays."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mlax._jax import count_non_finite, is_on_host, is_unsharded_cpu, share_buffers, tree_vdot
from mlax.optim._hyperparams import hyperparam_ranges, hyperparams_at
from mlax.optim._slot_layout import SlotLayout, SlotsByName
from mlax.optim._trees import cast_like

LARGEST_RATE = 1e15  # at which the steps of a bounded optimizer are far from infinite


@dataclasses.dataclass(frozen=True)
class UpdateContext:
    """The step of an update and its inputs besides arrays, as each wrapper passes it on to the optimizer inside."""

    step: jax.Array  # () int32, the number of updates before this one
    overrides: Mapping[str, Any]  # hyperparameters passed to `update`
    rate_factors: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # factors of the rate, by path
    value: Any = None  # the loss
    evaluate: Callable[[Any], Any] | None = None  # maps weights by path to the loss and its gradients by path
    # maps a sum over these leaves to the sum over all leaves
    global_sum: Callable[[jax.Array], jax.Array] = lambda amount: amount
    chunked: bool = False  # whether these may be some of the leaves, or some of their rows
    shared_step: bool = False  # whether the step is also that of others, so that no update can hold it back

    def hyperparams(self, optimizer: Any) -> dict[str, Any]:
        """The hyperparameters of an optimizer at this step."""
        return hyperparams_at(optimizer, self.step, self.overrides)

    def loss_value(self, dtype: Any) -> jax.Array:
        """`value` in this dtype; it must be a scalar."""
        if jnp.shape(self.value) != ():
            raise ValueError(f"update: value has shape {jnp.shape(self.value)}, but the loss must be a scalar.")
        return jnp.asarray(self.value).astype(dtype)

    def scale_rates(self, factors: Mapping[str, Any]) -> "UpdateContext":
        """The context with the rates of some leaves multiplied by factors."""
        scaled = {path: factor * self.rate_factors.get(path, 1.0) for path, factor in factors.items()}
        return dataclasses.replace(self, rate_factors={**self.rate_factors, **scaled})

    def without_overrides(self, optimizer: Any) -> "UpdateContext":
        """The context without the overrides of this optimizer, for one inside it with fields of the same names."""
        own = hyperparam_ranges(type(optimizer))
        return dataclasses.replace(self, overrides={k: v for k, v in self.overrides.items() if k not in own})


class LeafArrays(NamedTuple):
    """Gradients, weights and slots of some leaves, or of some of their rows, as stored."""

    grads: dict[str, Any]  # by path
    weights: dict[str, Any]  # by path
    slots: SlotsByName

    def subset(self, paths: Iterable[str]) -> "LeafArrays":
        """The arrays of some leaves."""
        paths = list(paths)
        slots = {name: {path: slot[path] for path in paths if path in slot} for name, slot in self.slots.items()}
        return LeafArrays({path: self.grads[path] for path in paths}, {p: self.weights[p] for p in paths}, slots)

    def any_on_host(self) -> bool:
        """Whether one of the arrays is in host memory."""
        return any(map(is_on_host, jax.tree.leaves(self)))


@dataclasses.dataclass(frozen=True)
class Update:
    """One update of an optimizer; if `apply_if` is False, it leaves everything unchanged.

    With `skip_nonfinite` it does so too if a new weight is not finite. Leaves that are updated in chunks are exempt:
    each chunk is written before the next one is known. The new weights of a bounded leaf (`Optimizer.is_bounded`) are
    finite if the norm of its gradient is: only that is computed in advance, and the weights in the pass that stores
    them. One that overflows all the same, from the largest float32 say, stays as it is.
    """

    optimizer: Any
    layout: SlotLayout
    context: UpdateContext
    scalars: Mapping[str, jax.Array]
    apply_if: jax.Array | None = None
    skip_nonfinite: bool = False
    bounded: frozenset[str] = frozenset()  # leaves whose new weights are not checked before one of them is stored

    def apply(self, arrays: LeafArrays, row: Any = 0) -> tuple[LeafArrays, dict[str, Any]]:
        """The new arrays, and the new step and scalars; `row` is the index of the first row, if these are slices."""
        update = self._check_gradients(arrays)
        if not update._is_conditional(arrays):
            return update._compute(arrays, row)
        _, result = update._update_leaves(arrays)
        update = update._check_weights(result.weights, arrays.weights)
        taken = dataclasses.replace(update, apply_if=None, skip_nonfinite=False)
        return lax.cond(update.apply_if, lambda: taken._compute(arrays, row), lambda: (arrays, update._before()))

    def _compute(self, arrays: LeafArrays, row: Any) -> tuple[LeafArrays, dict[str, Any]]:
        weights, (new_weights, new_slots) = self._update_leaves(arrays)
        update = self._check_weights(new_weights, arrays.weights)
        new = LeafArrays(arrays.grads, dict(arrays.weights), {name: dict(slot) for name, slot in arrays.slots.items()})
        for path, w in new_weights.items():
            update._store_weights(new, path, w, weights[path], row)
        for name, slot in new.slots.items():
            for path, leaf in new_slots.get(name, {}).items():
                slot[path] = update._select(cast_like(leaf, slot[path]), slot[path])
        if jax.default_backend() == "gpu" and _is_elementwise(self.optimizer):
            _share_leaf_buffers(new, arrays)
        return new, {
            name: update._select(new_slots[name].astype(old.dtype), old) for name, old in self._before().items()
        }

    def _update_leaves(self, arrays: LeafArrays) -> tuple[dict[str, Any], Any]:
        """The weights before the update, and the new weights and slots, in the compute dtype."""
        layouts = self.layout.leaves
        grads = {path: layouts[path].upcast(g) for path, g in arrays.grads.items()}
        weights = {
            path: layouts[path].read(w, {name: slot[path] for name, slot in arrays.slots.items() if path in slot})
            for path, w in arrays.weights.items()
        }
        slots = {**self._before(), "step": self.context.step + 1, **self.layout.upcast_slots(arrays.slots)}
        return weights, self.optimizer.update_leaves(self.context, grads, weights, slots)

    def _before(self) -> dict[str, jax.Array]:
        return {"step": self.context.step, **self.scalars}

    def _check_gradients(self, arrays: LeafArrays) -> "Update":
        """The update that is applied only if the gradients of bounded leaves have a finite norm."""
        if not self.skip_nonfinite or self.context.chunked:
            return self
        bounded = {path: g for path, g in arrays.grads.items() if self._is_bounded(path, arrays.weights[path])}
        if not bounded:
            return self
        grads = {path: self.layout.leaves[path].upcast(g) for path, g in bounded.items()}
        finite = jnp.isfinite(tree_vdot(grads, grads))
        for rate in self.optimizer.learning_rates(self.context, self.scalars, self.scalars).values():
            finite = finite & (abs(rate) < LARGEST_RATE)
        return dataclasses.replace(self._apply_only_if(finite), bounded=frozenset(bounded))

    def _is_bounded(self, path: str, stored: jax.Array) -> bool:
        return self.optimizer.is_bounded(path) and float(jnp.finfo(stored.dtype).max) > 1e38

    def _is_conditional(self, arrays: LeafArrays) -> bool:
        """Whether a conditional chooses between the new arrays and the old ones, and not a select of each element.

        On a CPU it is nearly free, where XLA copies arrays for the selects; on a GPU the host would wait for it. New
        weights that have to be checked are computed twice, which only elementwise updates are cheap enough for.
        """
        if self.context.chunked or (self.apply_if is None and not self.skip_nonfinite):
            return False
        checks_weights = self.skip_nonfinite and not self.bounded >= arrays.grads.keys()
        if checks_weights and not _is_elementwise(self.optimizer):
            return False
        return bool(arrays.grads) and all(map(is_unsharded_cpu, jax.tree.leaves(arrays)))

    def _check_weights(self, new: Mapping[str, jax.Array], stored: Mapping[str, jax.Array]) -> "Update":
        """The update that is applied only if all new weights are finite in the dtypes in which they are stored."""
        checked = {path: w.astype(stored[path].dtype) for path, w in new.items() if path not in self.bounded}
        if not self.skip_nonfinite or self.context.chunked or not checked:
            return self
        return self._apply_only_if(count_non_finite(checked) == 0)

    def _apply_only_if(self, condition: jax.Array) -> "Update":
        return dataclasses.replace(self, apply_if=condition if self.apply_if is None else condition & self.apply_if)

    def _store_weights(self, arrays: LeafArrays, path: str, w: jax.Array, before: jax.Array, row: Any) -> None:
        """Store the weights of a leaf, and the slots of their rounding, in `arrays`."""
        layout, old = self.layout.leaves[path], arrays.weights[path]
        if path in self.bounded:
            w = jnp.where(jnp.isfinite(w), w, before)
        if layout.reads_weights:
            stored, slots = layout.write(w, self.context.step, row)
            arrays.weights[path] = self._select(cast_like(stored, old), old)
        else:  # do not read the weights just to leave them unchanged: they may be in host memory
            stored, slots = layout.write(self._select(w, before), self.context.step, row)
            arrays.weights[path] = cast_like(stored, old)
        for name, leaf in slots.items():
            arrays.slots[name][path] = self._select(leaf, arrays.slots[name][path])

    def _select(self, new: jax.Array, old: jax.Array) -> jax.Array:
        return new if self.apply_if is None or new is old else jnp.where(self.apply_if, new, old)


def _is_elementwise(optimizer: Any) -> bool:
    return optimizer.elementwise and all(map(_is_elementwise, optimizer.inner_optimizers()))


def _share_leaf_buffers(new: LeafArrays, old: LeafArrays) -> None:
    """Let XLA write the weights and slots of each leaf over one another, in whatever order they are donated."""
    for path in list(new.weights):
        holders = {"": (new.weights, old.weights)}
        holders |= {name: (slot, old.slots[name]) for name, slot in new.slots.items() if path in slot}
        shared = share_buffers(*({name: held[i][path] for name, held in holders.items()} for i in (0, 1)))
        for name, (here, _) in holders.items():
            here[path] = shared[name]
