"""retrace: why a jitted function was compiled again."""

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from mlax._jax import leaves_with_paths
from mlax.core import Documented, count_of, document_tuple

COMPILED = "/jax/core/compile/backend_compile_duration"  # the event that JAX records after each compilation


@document_tuple
class ArgumentChange(NamedTuple):
    """An argument, or a leaf of one, that differs from the closest earlier call, and what to do about it."""

    name: str  # like "batch/x"
    before: str  # what it was
    after: str  # what it is
    advice: str  # what to do

    def __str__(self) -> str:
        return f"{self.name} was {self.before} and is now {self.after}; {self.advice}"


@document_tuple
class Compilation(NamedTuple):
    """One compilation of a function: in which call, how long it took, and what had changed."""

    call: int  # from 1
    seconds: float  # that it took
    changes: tuple[ArgumentChange, ...]  # none for the first compilation

    def __str__(self) -> str:
        start = f"call {self.call} compiled in {self.seconds:.2f} s"
        if self.call == 1:
            return f"{start}: the first call"
        if not self.changes:
            return (
                f"{start}, although no argument changed: the configuration (jax.config) or the mesh (jax.set_mesh) "
                "around the call did, or JAX had dropped the program (jax.clear_caches)"
            )
        return "\n".join([f"{start}:", *(f"  {change}" for change in self.changes)])


class LeafType(NamedTuple):
    """The type of a leaf, as far as JAX compiles for it."""

    shape: tuple[int, ...]
    dtype: str
    weak_type: bool
    sharding: Any  # None: it is wherever the other arguments are

    def __str__(self) -> str:
        weak = ", weakly typed" if self.weak_type else ""
        where = "" if self.sharding is None else f", {self.sharding}"
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{weak}{where}"


class Signature(NamedTuple):
    """What JAX may compile a function for: the types of the leaves of its arguments, and what may be static."""

    types: dict[str, LeafType]
    objects: dict[str, Any]  # leaves that only a static argument can have
    numbers: dict[str, Any]  # Python numbers, whose values matter if their argument is static


def retrace(function: Callable[..., Any], *, show: bool = True) -> "Retraced":
    """Wrap a jitted function to learn why it is compiled again: `step = inspect.retrace(jax.jit(step))`.

    Each compilation is kept in `compilations`, and all but the first are reported on stderr, unless `show=False`: which
    argument's shape, dtype, weak type, sharding or static value differs from the closest earlier call, and what to do.
    """
    if not hasattr(function, "trace") and not hasattr(function, "lower"):  # Equinox's `filter_jit` has only this
        name = getattr(function, "__name__", repr(function))
        raise TypeError(f"retrace: {name} is not jitted; write inspect.retrace(jax.jit({name})).")
    return Retraced(function, show=show)


class Retraced(metaclass=Documented):
    """A jitted function that keeps its `compilations`; `print` shows all of them."""

    def __init__(self, function: Any, *, show: bool):
        functools.update_wrapper(self, function)
        self.function = function
        self.show = show
        self.calls = 0
        self.compilations: list[Compilation] = []
        self._signatures: list[Signature] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        found = _signature(self.function, args, kwargs)  # before the call, which may donate them
        with _count_compilations() as seconds:
            try:
                result = self.function(*args, **kwargs)
            except ValueError as error:
                _explain_unhashable(error, _name_arguments(self.function, args, kwargs))
                raise
        if seconds:
            changes = _nearest_changes(self._signatures, found)
            self.compilations.append(Compilation(self.calls, sum(seconds), changes))
        if seconds or self.calls == 1:  # it may have been compiled before it was wrapped
            self._signatures.append(found)
            if seconds and self.show and self.calls > 1:
                print(f"{getattr(self, '__name__', 'function')}: {self.compilations[-1]}", file=sys.stderr)
        return result

    def __str__(self) -> str:
        total = f"{count_of(len(self.compilations), 'compilation')} in {count_of(self.calls, 'call')}"
        return "\n".join([total, *map(str, self.compilations)])


@contextlib.contextmanager
def _count_compilations() -> Iterator[list[float]]:
    """The seconds of each compilation by this thread inside the block."""
    seconds: list[float] = []
    thread = threading.get_ident()

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED and threading.get_ident() == thread:
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _signature(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    found = Signature({}, {}, {})
    for name, argument in _name_arguments(function, args, kwargs).items():
        for path, leaf in leaves_with_paths(argument):
            where = f"{name}/{path}" if path else name
            if isinstance(leaf, bool | int | float | complex):
                found.numbers[where] = leaf
            if isinstance(leaf, bool | int | float | complex | jax.Array | np.ndarray | np.generic):
                found.types[where] = _leaf_type(leaf)
            else:
                found.objects[where] = leaf
    return found


def _name_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by the names of their parameters, those of `*args` and `**kwargs` one by one."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    names = [plain[i] if i < len(plain) else f"argument {i}" for i in range(len(args))]
    return {**dict(zip(names, args, strict=True)), **kwargs}


def _leaf_type(leaf: Any) -> LeafType:
    kind = jax.typeof(leaf)
    committed = isinstance(leaf, jax.Array) and getattr(leaf, "committed", False)
    return LeafType(
        kind.shape, str(kind.dtype), getattr(kind, "weak_type", False), leaf.sharding if committed else None
    )


def _nearest_changes(earlier: list[Signature], found: Signature) -> tuple[ArgumentChange, ...]:
    """How a signature differs from the closest earlier one, the last of them."""
    nearest = min(reversed(earlier), key=lambda each: _distance(each, found), default=None)
    return () if nearest is None else _changes(nearest, found)


def _distance(before: Signature, after: Signature) -> int:
    """In how many properties of leaves, and values, two signatures differ."""
    types = [(before.types.get(name), after.types.get(name)) for name in before.types.keys() | after.types.keys()]
    properties = sum(
        len(LeafType._fields) if old is None or new is None else sum(a != b for a, b in zip(old, new, strict=True))
        for old, new in types
    )
    return properties + len(_value_changes(before.objects, after.objects))


def _changes(before: Signature, after: Signature) -> tuple[ArgumentChange, ...]:
    types = [
        ArgumentChange(name, str(before.types.get(name, "absent")), str(after.types.get(name, "absent")), advice)
        for name in dict.fromkeys([*before.types, *after.types])
        if (advice := _type_advice(before.types.get(name), after.types.get(name)))
    ]
    objects = _value_changes(before.objects, after.objects)
    # numbers of an argument that is not static do not matter: only if nothing else explains the compilation
    return tuple([*types, *objects] or _value_changes(before.numbers, after.numbers))


def _type_advice(before: LeafType | None, after: LeafType | None) -> str:
    """What to do about a leaf of another type; empty if the types are equal."""
    if before == after:
        return ""
    if before is None or after is None:
        return "pass it in every call, or in none; in a pytree, an array in place of None"
    if before.shape != after.shape:
        return "pad it to a fixed shape, or to one of a few (train.Feed pads batches, train.Buckets sequences)"
    if before.dtype != after.dtype:
        return f"cast it, once, where it comes from: x.astype({before.dtype!r})"
    if before.weak_type != after.weak_type:
        return f"pass the same kind in each call: a Python number, or jnp.asarray(value, {after.dtype!r})"
    return "place it before the call: jax.device_put(x, sharding)"


def _value_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[ArgumentChange]:
    return [
        ArgumentChange(name, _describe(before.get(name)), _describe(after.get(name)), _static_advice(after.get(name)))
        for name in dict.fromkeys([*before, *after])
        if not _is_equal(before.get(name), after.get(name))
    ]


def _static_advice(value: Any) -> str:
    if isinstance(value, bool | int | float | complex):
        return (
            "a static argument is compiled for each value: leave it out of static_argnames unless shapes depend on it"
        )
    if type(value).__eq__ is object.__eq__:
        return "it is compared by identity: create it once, outside of the loop, or pass a frozen dataclass"
    return "a static argument is compiled for each value"


def _is_equal(before: Any, after: Any) -> bool:
    try:
        return type(before) is type(after) and bool(before == after)
    except Exception:  # a comparison of the user's
        return before is after


def _describe(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _explain_unhashable(error: ValueError, arguments: Mapping[str, Any]) -> None:
    """Add a note to JAX's error for a static argument that cannot be hashed, with its name."""
    if "hashable" in str(error):
        for name, value in arguments.items():
            # JAX's error has the type of the value, but not the name of the argument
            if isinstance(value, list | dict | set | np.ndarray | jax.Array) and str(type(value)) in str(error):
                kind = type(value).__name__
                error.add_note(f"if {name}, a {kind}, is the static argument: pass a tuple or a frozen dataclass.")
