"""The slots of an optimizer for given trainables: names, shapes, dtypes and shardings."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mlax._jax import at_least_float32, widest_dtype
from mlax.core import match_paths, signature
from mlax.optim._rounding import Rounding, RoundToNearest
from mlax.optim._slots import OptimizerState, Slot, empty_slot, make_state
from mlax.optim._trees import FlatTree


class LeafPolicy(NamedTuple):
    """The dtype of the arithmetic at a leaf, those of its slots by name, and how its weights are rounded."""

    accum_dtype: Any = None  # None: the parameter's own, or float32 if that is narrower
    slot_dtypes: tuple[tuple[str, Any], ...] = ()
    rounding: Rounding = RoundToNearest()


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """The slots beside each leaf, by path and name."""

    leaves: FlatTree
    policies: dict[str, LeafPolicy]
    declared: dict[str, dict[str, Slot]]
    names: tuple[str, ...]
    by_rounding: frozenset[str]  # those among the names that the optimizer itself does not know of
    scalars: dict[str, float | int]

    def has(self, name: str, path: str) -> bool:
        """Whether this leaf has this slot."""
        return name in self.declared[path]

    def slot(self, name: str, path: str) -> Slot:
        """The slot as declared, or an absent one."""
        return self.declared[path].get(name) or empty_slot()

    def dtype(self, name: str, path: str) -> Any:
        """The dtype of a slot at a leaf."""
        slot = self.slot(name, path)
        own = self.wide(path) if slot.wide else self.leaves.by_path[path].dtype
        return jnp.dtype(dict(self.policies[path].slot_dtypes).get(name) or slot.dtype or own)

    def wide(self, path: str) -> Any:
        """The dtype of the arithmetic at a leaf."""
        return _accum_dtype(self.policies[path], self.leaves.by_path[path])

    def first(self, name: str, path: str, w: Any) -> Any:
        """The first value of a slot at a leaf."""
        return self.slot(name, path).first(w, self.dtype(name, path))

    def scalar_dtype(self, name: str) -> Any:
        """The dtype of a scalar: whole numbers, or as wide as the widest arithmetic."""
        if isinstance(self.scalars[name], int):
            return jnp.dtype(jnp.int32)
        return widest_dtype(self.wide(path) for path in self.leaves.by_path)

    def widened(self, path: str, leaf: Any) -> Any:
        """A leaf, if it holds floating-point numbers, in the dtype of the arithmetic."""
        return leaf.astype(self.wide(path)) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    def slots_of(self, given: OptimizerState) -> dict[str, dict[str, Any]]:
        """The slots of a state by name and path, without the leaves that are absent."""
        found = {name: self.leaves.same(getattr(given, name), name) for name in self.names}
        return {
            name: {path: leaf for path, leaf in slot.items() if self.has(name, path)} for name, slot in found.items()
        }

    def opened(self, slots: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The optimizer's own slots in the dtype of the arithmetic."""
        return {
            name: {path: self.widened(path, leaf) for path, leaf in slot.items()}
            for name, slot in slots.items()
            if name not in self.by_rounding
        }

    def read(self, path: str, w: Any, slots: dict[str, dict[str, Any]]) -> Any:
        """A parameter in the dtype of the arithmetic."""
        if self.wide(path) == w.dtype:
            return w
        own = {name: slot[path] for name, slot in slots.items() if path in slot}
        return self.policies[path].rounding.read(w, own, self.wide(path))

    def reads_weights(self, path: str) -> bool:
        """Whether the parameter itself is looked at, and not only what its rounding keeps beside it."""
        return self.wide(path) == self.leaves.by_path[path].dtype or self.policies[path].rounding.reads_weights

    def write(self, path: str, w: Any, step: Any, row: Any = 0) -> tuple[Any, dict[str, Any]]:
        """A parameter, or its rows from `row` on, in its own dtype, and what its rounding keeps, in the slot's."""
        dtype = self.leaves.by_path[path].dtype
        if self.wide(path) == dtype:
            return w, {}
        new, kept = self.policies[path].rounding.write(w, dtype, step, path, row)
        return new, {name: leaf.astype(self.dtype(name, path)) for name, leaf in kept.items()}

    def check(self, given: OptimizerState) -> None:
        """Refuse the state of another optimizer, or of other trainables."""
        wanted = ("step", *self.names, *self.scalars)
        if getattr(given, "_fields", None) != wanted:
            raise ValueError(
                f"{self.leaves.owner}: the state has {', '.join(getattr(given, '_fields', [type(given).__name__]))}, "
                f"but must have {', '.join(wanted)}; make it by `init` of the same optimizer."
            )
        for name in self.names:
            for path, leaf in self.leaves.same(getattr(given, name), name).items():
                shape, dtype = self.slot(name, path).shape(self.leaves.by_path[path]), self.dtype(name, path)
                if leaf.shape != shape or leaf.dtype != dtype:
                    raise ValueError(
                        f"{self.leaves.owner}: {name} at {path!r} is {signature(leaf)}, but must be "
                        f"{signature(jax.ShapeDtypeStruct(shape, dtype))}; make it by `init` of the same optimizer."
                    )

    def partition(self, specs: Any) -> OptimizerState:
        """The state's specs from the trainables'."""
        by_path = self.leaves.same(specs, "specs")
        fields = {"step": _with_device_memory(Slot(()).sharding(next(iter(by_path.values()), PartitionSpec())))}
        for name in self.names:
            fields[name] = self.leaves.tree(
                {path: self.slot(name, path).sharding(spec) for path, spec in by_path.items()}
            )
        return make_state({**fields, **dict.fromkeys(self.scalars, fields["step"])})


def slot_layout(optimizer: Any, leaves: FlatTree) -> SlotLayout:
    """The layout of an optimizer beside these trainables; refuses patterns and slot dtypes that fit nothing."""
    match_paths(optimizer.patterns(), leaves.by_path)
    policies = {path: optimizer.policy(path) for path in leaves.by_path}
    declared: dict[str, dict[str, Slot]] = {}
    by_rounding: set[str] = set()
    for path, w in leaves.by_path.items():
        declared[path] = dict(optimizer.slots(path, w))
        rounding = policies[path].rounding
        if rounding != RoundToNearest() and _accum_dtype(policies[path], w) != w.dtype:
            extra = rounding.slots()
            by_rounding |= extra.keys()
            declared[path] |= extra
    names = tuple(dict.fromkeys(name for slots in declared.values() for name in slots))
    for policy in policies.values():
        for name, _ in policy.slot_dtypes:
            if name not in names:
                raise ValueError(
                    f"{leaves.owner}: slot_dtypes names {name!r}, but the slots are {', '.join(names) or 'none'}."
                )
    return SlotLayout(leaves, policies, declared, names, frozenset(by_rounding), optimizer.scalars())


def _with_device_memory(sharding: Any) -> Any:
    """The same in the device's memory: a scalar is never worth a transfer."""
    in_host = getattr(sharding, "memory_kind", None) not in (None, "device")
    return sharding.with_memory_kind("device") if in_host else sharding


def _accum_dtype(policy: LeafPolicy, w: Any) -> Any:
    return jnp.dtype(policy.accum_dtype or at_least_float32(w.dtype))


def slot_table(layout: SlotLayout) -> str:
    """The weights, the slots and the scalars: dtypes, leaves, numbers, bytes; and the bytes of the state."""
    weights = layout.leaves.by_path
    rows = _table_rows("trainables", [(w.shape, w.dtype) for w in weights.values()])
    state = []
    for name in layout.names:
        kept = [path for path in weights if layout.has(name, path)]
        state += _table_rows(name, [(layout.slot(name, p).shape(weights[p]), layout.dtype(name, p)) for p in kept])
    state += _table_rows("step", [((), jnp.int32)])
    for name in layout.scalars:
        state += _table_rows(name, [((), layout.scalar_dtype(name))])
    lines = [("", "dtype", "leaves", "numbers", "bytes")]
    lines += [(name, dtype, *(f"{number:,}" for number in numbers)) for name, dtype, *numbers in (*rows, *state)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(word.ljust(width) if place < 2 else word.rjust(width) for place, (word, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    total = sum(row[-1] for row in state)
    return "\n".join([layout.leaves.owner, *map(str.rstrip, aligned), f"the state: {total:,} bytes"])


def _table_rows(name: str, leaves: list[tuple[tuple[int, ...], Any]]) -> list[tuple[str, str, int, int, int]]:
    """A row for each dtype: name, dtype, leaves, numbers, bytes."""
    counts: dict[str, list[int]] = collections.defaultdict(list)
    for shape, dtype in leaves:
        counts[jnp.dtype(dtype).name].append(math.prod(shape))
    return [
        (name, dtype, len(each), sum(each), sum(each) * jnp.dtype(dtype).itemsize) for dtype, each in counts.items()
    ]
