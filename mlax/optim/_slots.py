"""Slot and OptimizerState: what an optimizer stores for each parameter, and the named tuple of all of it."""

import collections
import functools
from collections.abc import Collection, Mapping
from types import EllipsisType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mlax._jax import is_on_host, map_chunks, slice_to_device, to_host
from mlax.core import document_tuple, print_as_table


@document_tuple
class Slot(NamedTuple):
    """The declaration of one leaf of a slot: each axis is an axis of the parameter, by index, or a new one, None."""

    axes: tuple[int | None, ...] | EllipsisType = ...  # ...: all axes of the parameter
    sizes: tuple[int, ...] = ()  # of the new axes, in order
    start: float = 0.0  # the first value
    dtype: Any = None  # None: the parameter's, or the compute dtype if `wide`
    wide: bool = False  # for values whose changes a narrow dtype would round away: long averages, sums, weights
    copy: bool = False  # starts as a copy of the parameter

    def shape(self, parameter: Any) -> tuple[int, ...]:
        """The shape of the slot for this parameter."""
        if isinstance(self.axes, EllipsisType):
            return parameter.shape
        sizes = iter(self.sizes)
        return tuple(next(sizes) if axis is None else parameter.shape[axis] for axis in self.axes)

    def init_value(self, parameter: jax.Array, dtype: Any) -> jax.Array:
        """The initial value, sharded along the axes of the parameter, and in the same memory.

        XLA chooses the sharding of a constant. So the value is derived from the parameter, by a comparison that is
        never true: that preserves the sharding of the axes, inside `jax.jit` and outside.
        """
        if is_on_host(parameter):
            return _init_on_host(self, jnp.dtype(dtype), parameter)
        if self.copy:
            return jnp.array(parameter, dtype, copy=True)  # a buffer that both share could not be donated
        all_false = (parameter < 0) & (parameter > 0)
        if not isinstance(self.axes, EllipsisType):
            kept = sorted(axis for axis in self.axes if axis is not None)
            all_false = lax.reduce_or(all_false, [axis for axis in range(parameter.ndim) if axis not in kept])
            order = sorted((axis, place) for place, axis in enumerate(self.axes) if axis is not None)
            all_false = lax.broadcast_in_dim(all_false, self.shape(parameter), [place for _, place in order])
        zero = all_false.astype(dtype)
        return zero if self.start == 0 else zero + jnp.asarray(self.start, dtype)

    def sharding(self, parameter: Any) -> Any:
        """The PartitionSpec or Sharding of the slot, from that of the parameter."""
        if isinstance(self.axes, EllipsisType):
            return parameter
        if isinstance(parameter, NamedSharding):
            return NamedSharding(parameter.mesh, self.sharding(parameter.spec), memory_kind=parameter.memory_kind)
        if isinstance(parameter, Sharding):
            return parameter
        entries = [None if axis is None or axis >= len(parameter) else parameter[axis] for axis in self.axes]
        return PartitionSpec(*entries)


EMPTY = Slot((None,), (0,))  # the leaf of a slot that a parameter does not need


@functools.partial(jax.jit, static_argnums=(0, 1))
def _init_on_host(slot: Slot, dtype: Any, parameter: jax.Array) -> jax.Array:
    """The initial value in host memory, computed on the device in chunks."""
    if isinstance(slot.axes, EllipsisType) or slot.axes[:1] == (0,) or not parameter.ndim:
        return map_chunks(lambda rows: slot.init_value(rows, dtype), parameter)
    row = slice_to_device(parameter, 0)  # one is enough, since the slot does not have the first axis
    return to_host(slot.init_value(row, dtype))


if TYPE_CHECKING:

    class OptimizerState(tuple[Any, ...]):
        """A named tuple: `step`, the number of updates so far, () int32; slots, each like the trainables; scalars."""

        step: jax.Array
        _fields: tuple[str, ...]

        def __getattr__(self, name: str) -> Any: ...
        def _asdict(self) -> dict[str, Any]: ...
        def _replace(self, **fields: Any) -> "OptimizerState": ...

else:
    OptimizerState = Annotated[tuple, "named"]  # `step`, then the slots, each like the trainables, then scalars
    OptimizerState.__doc__ = "A named tuple: `step`, the updates so far; the slots, each like the trainables; scalars."


def make_state(fields: Mapping[str, Any]) -> OptimizerState:
    """The state with these fields. Equal names share one type, so that equal states have the same tree structure."""
    return _state_type(tuple(fields))(**fields)  # pyright: ignore[reportReturnType]


@functools.cache
def _state_type(names: tuple[str, ...]) -> type:
    kind = print_as_table(collections.namedtuple("OptimizerState", names))  # noqa: PYI024  # the names are known at run time only
    kind.__reduce__ = lambda self: (make_state, (self._asdict(),))  # pickle cannot import a type created at run time
    return kind


def unused_name(name: str, used: Collection[str], start: int = 1) -> str:
    """The name, or else the first of `name_<start>`, `name_<start + 1>`, ... that is unused."""
    candidates = (name, *(f"{name}_{number}" for number in range(start, start + len(used) + 1)))
    return next(candidate for candidate in candidates if candidate not in used)
