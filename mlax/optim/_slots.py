"""Slot and OptimizerState: what an optimizer stores beside each parameter, and the tuple of all of it."""

import collections
import functools
from collections.abc import Mapping
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mlax._jax import is_on_host, map_chunks, slice_to_device, to_host


class Slot(NamedTuple):
    """One leaf of a slot, declared: each of its axes is one of the parameter's, by number, or its own, None."""

    axes: tuple[int | None, ...] | EllipsisType = ...  # ...: those of the parameter, all of them
    own: tuple[int, ...] = ()  # the sizes of its own axes, in order
    start: float = 0.0
    dtype: Any = None  # None: the parameter's, or that of the arithmetic if it is `wide`
    wide: bool = False  # for what changes by less than a narrow dtype can tell: long averages, sums, weights
    copies: bool = False  # starts as the parameter itself

    def shape(self, parameter: Any) -> tuple[int, ...]:
        """Its shape beside this parameter."""
        if isinstance(self.axes, EllipsisType):
            return parameter.shape
        own = iter(self.own)
        return tuple(next(own) if axis is None else parameter.shape[axis] for axis in self.axes)

    def first(self, parameter: jax.Array, dtype: Any) -> jax.Array:
        """Its first value, laid over devices as the parameter's axes are.

        A constant would lie wherever the compiler likes. So it is computed from the parameter, by a comparison which
        never holds: that keeps the axes' placement, inside of jit and outside of it. Beside a parameter in host
        memory it is there too.
        """
        if is_on_host(parameter):
            return _init_on_host(self, jnp.dtype(dtype), parameter)
        if self.copies:
            return jnp.array(parameter, dtype, copy=True)  # with one buffer for both, neither could be donated
        never = (parameter < 0) & (parameter > 0)
        if not isinstance(self.axes, EllipsisType):
            kept = sorted(axis for axis in self.axes if axis is not None)
            never = lax.reduce_or(never, [axis for axis in range(parameter.ndim) if axis not in kept])
            places = sorted((axis, place) for place, axis in enumerate(self.axes) if axis is not None)
            never = lax.broadcast_in_dim(never, self.shape(parameter), [place for _, place in places])
        zero = never.astype(dtype)
        return zero if self.start == 0 else zero + jnp.asarray(self.start, dtype)

    def sharding(self, parameter: Any) -> Any:
        """Its PartitionSpec or Sharding, given the parameter's."""
        if isinstance(self.axes, EllipsisType):
            return parameter
        if isinstance(parameter, NamedSharding):
            return NamedSharding(parameter.mesh, self.sharding(parameter.spec), memory_kind=parameter.memory_kind)
        if isinstance(parameter, Sharding):
            return parameter
        entries = [None if axis is None or axis >= len(parameter) else parameter[axis] for axis in self.axes]
        return PartitionSpec(*entries)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _init_on_host(slot: Slot, dtype: Any, parameter: jax.Array) -> jax.Array:
    """The first value in host memory, of which the device holds a piece at a time."""
    follows = isinstance(slot.axes, EllipsisType) or slot.axes[:1] == (0,) or not parameter.ndim
    if follows:
        return map_chunks(lambda rows: slot.first(rows, dtype), parameter)
    return to_host(
        slot.first(slice_to_device(parameter, 0), dtype)
    )  # of an axis that it does not keep one row is enough


def empty_slot() -> Slot:
    """The leaf of a slot that a parameter does not need: no numbers at all."""
    return Slot((None,), (0,))


if TYPE_CHECKING:

    class OptimizerState(tuple[Any, ...]):
        """A named tuple: `step`, the updates made so far, () int32; then slots, each like the trainables; scalars."""

        step: jax.Array
        _fields: tuple[str, ...]

        def __getattr__(self, name: str) -> Any: ...
        def _asdict(self) -> dict[str, Any]: ...
        def _replace(self, **fields: Any) -> "OptimizerState": ...

else:
    OptimizerState = tuple  # a named tuple: `step`, then the slots, each like the trainables, then scalars


def make_state(fields: Mapping[str, Any]) -> OptimizerState:
    """The state with these fields. Equal names are one type, so that JAX takes equal states for one tree."""
    return _state_type(tuple(fields))(**fields)  # pyright: ignore[reportReturnType]


@functools.cache
def _state_type(names: tuple[str, ...]) -> type:
    kind = collections.namedtuple("OptimizerState", names)  # noqa: PYI024  # the names are known at run time only
    kind.__reduce__ = lambda self: (make_state, (self._asdict(),))  # pickle cannot find a type that no module holds
    return kind
