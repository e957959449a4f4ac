"""SlotLayout: the slots of an optimizer for given trainables, with their shapes, dtypes and shardings."""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mlax._jax import at_least_float32, widest_dtype
from mlax.core import Text, align_columns, check_patterns, signature
from mlax.optim._rounding import LeafPolicy, RoundToNearest
from mlax.optim._slots import EMPTY, OptimizerState, Slot, make_state
from mlax.optim._trees import FlatTree

SlotsByName = dict[str, dict[str, Any]]  # the leaves of slots, by the slot's name, then by path


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """What is stored for one parameter, in which dtypes, and how it is read and written."""

    path: str
    parameter: Any  # an array, or anything with its shape and dtype
    policy: LeafPolicy
    slots: dict[str, Slot]

    @functools.cached_property
    def accum_dtype(self) -> Any:
        """The compute dtype."""
        return jnp.dtype(self.policy.accum_dtype or at_least_float32(self.parameter.dtype))

    @property
    def is_rounded(self) -> bool:
        """Whether the parameter has another dtype than the arithmetic."""
        return self.accum_dtype != self.parameter.dtype

    @property
    def reads_weights(self) -> bool:
        """Whether an update depends on the parameter itself, and not only on the slots of its rounding."""
        return not self.is_rounded or self.policy.rounding.reads_weights

    def slot(self, name: str) -> Slot:
        """The declaration of a slot, or of an empty one."""
        return self.slots.get(name, EMPTY)

    def slot_dtype(self, name: str) -> Any:
        """The dtype in which a slot is stored."""
        slot = self.slot(name)
        default = self.accum_dtype if slot.wide else self.parameter.dtype
        return jnp.dtype(dict(self.policy.slot_dtypes).get(name) or slot.dtype or default)

    def upcast(self, leaf: Any) -> Any:
        """A gradient or a slot in the compute dtype, unless it is an integer."""
        return leaf.astype(self.accum_dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    def read(self, w: Any, slots: dict[str, Any]) -> Any:
        """The parameter in the compute dtype, given its slots as stored."""
        return self.policy.rounding.read(w, slots, self.accum_dtype) if self.is_rounded else w

    def write(self, new: Any, step: Any, row: Any = 0) -> tuple[Any, dict[str, Any]]:
        """The parameter, or its rows from `row` on, in its own dtype, and the slots of its rounding, as stored."""
        if not self.is_rounded:
            return new, {}
        w, slots = self.policy.rounding.write(new, self.parameter.dtype, step, self.path, row)
        return w, {name: leaf.astype(self.slot_dtype(name)) for name, leaf in slots.items()}


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """What an optimizer stores for each of its parameters."""

    tree: FlatTree
    leaves: dict[str, LeafLayout]  # by path
    names: tuple[str, ...]  # of all slots
    rounding_names: frozenset[str]  # of those that belong to a rounding, unknown to the optimizer
    scalars: dict[str, float | int]  # their first values

    def scalar_dtype(self, name: str) -> Any:
        """The dtype of a scalar: int32, or that of the widest arithmetic."""
        if isinstance(self.scalars[name], int):
            return jnp.dtype(jnp.int32)
        return widest_dtype(leaf.accum_dtype for leaf in self.leaves.values())

    def flatten_slots(self, state: OptimizerState) -> SlotsByName:
        """The slots of a state, empty leaves included; it must be of the same optimizer and trainables."""
        fields = ("step", *self.names, *self.scalars)
        if getattr(state, "_fields", None) != fields:
            raise ValueError(
                f"{self.tree.owner}: the state has {', '.join(getattr(state, '_fields', [type(state).__name__]))}, "
                f"but must have {', '.join(fields)}; create it with `init` of the same optimizer."
            )
        slots = {name: self.tree.flatten_like(getattr(state, name), name) for name in self.names}
        for name, by_path in slots.items():
            for path, found in by_path.items():
                leaf = self.leaves[path]
                shape, dtype = leaf.slot(name).shape(leaf.parameter), leaf.slot_dtype(name)
                if found.shape != shape or found.dtype != dtype:
                    raise ValueError(
                        f"{self.tree.owner}: {name} at {path!r} is {signature(found)}, but must be "
                        f"{signature(jax.ShapeDtypeStruct(shape, dtype))}; create it with `init` of the same optimizer."
                    )
        return slots

    def drop_empty(self, slots: SlotsByName) -> SlotsByName:
        """The slots without the leaves of parameters that do not need them."""
        return {
            name: {path: leaf for path, leaf in by_path.items() if name in self.leaves[path].slots}
            for name, by_path in slots.items()
        }

    def upcast_slots(self, slots: SlotsByName) -> SlotsByName:
        """The optimizer's own slots in the compute dtype."""
        return {
            name: {path: self.leaves[path].upcast(leaf) for path, leaf in by_path.items()}
            for name, by_path in slots.items()
            if name not in self.rounding_names
        }

    def partition(self, specs: Any) -> OptimizerState:
        """The specs of the state, from those of the trainables."""
        by_path = self.tree.flatten_like(specs, "specs")
        scalar = _with_device_memory(Slot(()).sharding(next(iter(by_path.values()), PartitionSpec())))
        fields = {"step": scalar}
        for name in self.names:
            slot = {path: self.leaves[path].slot(name).sharding(spec) for path, spec in by_path.items()}
            fields[name] = self.tree.unflatten(slot)
        return make_state({**fields, **dict.fromkeys(self.scalars, scalar)})


def slot_layout(optimizer: Any, tree: FlatTree) -> SlotLayout:
    """The layout of an optimizer's slots; a pattern or a name in `slot_dtypes` that matches nothing is an error."""
    check_patterns(optimizer.patterns(), tree.by_path)
    optimizer.check_paths(tree.by_path)
    leaves: dict[str, LeafLayout] = {}
    rounding_names: set[str] = set()
    for path, w in tree.by_path.items():
        if optimizer.is_frozen(path):
            leaves[path] = LeafLayout(path, w, LeafPolicy(), {})
            continue
        leaf = LeafLayout(path, w, optimizer.policy(path), dict(optimizer.slots(path, w)))
        if not isinstance(leaf.policy.rounding, RoundToNearest) and leaf.is_rounded:
            extra = leaf.policy.rounding.slots()
            leaf.slots.update(extra)
            rounding_names |= extra.keys()
        leaves[path] = leaf
    names = tuple(dict.fromkeys(name for leaf in leaves.values() for name in leaf.slots))
    for leaf in leaves.values():
        for name, _ in leaf.policy.slot_dtypes:
            if name not in names:
                raise ValueError(
                    f"{tree.owner}: slot_dtypes names {name!r}, but the slots are {', '.join(names) or 'none'}."
                )
    scalars = optimizer.scalars()
    if both := {"step", *scalars} & set(names) or {"step"} & scalars.keys():
        raise ValueError(
            f"{tree.owner}: its state would have two fields {min(both)!r}; rename the slot or the scalar, or use a "
            "separate state for each optimizer."
        )
    return SlotLayout(tree, leaves, names, frozenset(rounding_names), scalars)


def slot_table(layout: SlotLayout) -> str:
    """A table of the weights, the slots and the scalars, with dtypes, leaves, elements and bytes; and the total."""
    leaves = layout.leaves.values()
    weights = _table_rows("trainables", [(leaf.parameter.shape, leaf.parameter.dtype) for leaf in leaves])
    state = []
    for name in layout.names:
        stored = [leaf for leaf in leaves if name in leaf.slots]
        state += _table_rows(name, [(leaf.slot(name).shape(leaf.parameter), leaf.slot_dtype(name)) for leaf in stored])
    state += _table_rows("step", [((), jnp.int32)])
    for name in layout.scalars:
        state += _table_rows(name, [((), layout.scalar_dtype(name))])
    lines = [("", "dtype", "leaves", "elements", "bytes")]
    lines += [(name, dtype, *(f"{count:,}" for count in counts)) for name, dtype, *counts in (*weights, *state)]
    total = sum(row[-1] for row in state)
    return Text("\n".join([layout.tree.owner, *align_columns(lines, right=range(2, 5)), f"the state: {total:,} bytes"]))


def _table_rows(name: str, leaves: list[tuple[tuple[int, ...], Any]]) -> list[tuple[str, str, int, int, int]]:
    """A row for each dtype: name, dtype, leaves, elements, bytes."""
    sizes: dict[str, list[int]] = collections.defaultdict(list)
    for shape, dtype in leaves:
        sizes[jnp.dtype(dtype).name].append(math.prod(shape))
    return [(name, dtype, len(each), sum(each), sum(each) * jnp.dtype(dtype).itemsize) for dtype, each in sizes.items()]


def _with_device_memory(sharding: Any) -> Any:
    """The sharding in device memory: a scalar is not worth a transfer."""
    on_host = getattr(sharding, "memory_kind", None) not in (None, "device")
    return sharding.with_memory_kind("device") if on_host else sharding
