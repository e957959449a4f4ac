"""The state of an optimizer: a named tuple of the step, the slots and the scalars that there are."""

import collections
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:

    class State(tuple[Any, ...]):
        """A named tuple: `step`, the updates made so far, () int32; then slots, each like the trainables; scalars."""

        step: jax.Array
        _fields: tuple[str, ...]

        def __getattr__(self, name: str) -> Any: ...
        def _asdict(self) -> dict[str, Any]: ...
        def _replace(self, **fields: Any) -> "State": ...

else:
    State = tuple


def state(fields: Mapping[str, Any]) -> State:
    """The state with these fields. Equal names are one type, so that JAX takes equal states for one tree."""
    return _kind(tuple(fields))(**fields)  # pyright: ignore[reportReturnType]


@functools.cache
def _kind(names: tuple[str, ...]) -> type:
    kind = collections.namedtuple("State", names)  # noqa: PYI024  # the names are known at run time only
    kind.__reduce__ = lambda self: (state, (self._asdict(),))  # pickle cannot find a type that no module holds
    return kind
