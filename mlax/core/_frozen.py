"""frozen: make a class a description, a frozen dataclass of hashable values that compares by value."""

import contextlib
import dataclasses
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np

from mlax.core._display import function_name
from mlax.core._errors import (
    SURGERY,
    constructor_error,
    not_a_dtype_message,
    short_repr,
    unknown_field_message,
    wrong_instance_message,
)
from mlax.core._help import DType, Size

C = TypeVar("C", bound=type)
D = TypeVar("D")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def frozen(cls: C) -> C:
    """Make `cls` a description: a frozen dataclass whose fields are hashable values and nothing else.

    Descriptions with equal fields are equal, hash equal and share their bound methods, so that `jax.jit(a.fwd)`
    and `jax.jit(b.fwd)` compile once when `a == b`. Fields are equal when both type and value are: 1, 1.0 and
    True differ. A NumPy scalar becomes a Python number; an array or an unhashable value is refused with the name of
    its field.
    """
    if not isinstance(cls, type):
        raise TypeError(f"frozen: {cls!r} is not a class; put @mlax.frozen above a class.")
    if not cls.__doc__:
        cls.__doc__ = " "  # or dataclasses would write one, for which it reads the signature of every class
    if "__post_init__" in vars(cls):
        cls.__post_init__ = _check_fields_before(cls.__post_init__)  # pyright: ignore[reportAttributeAccessIssue]
    described: Any = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    init = described.__init__

    @functools.wraps(init)
    def finalized_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if "__dataclass_fields__" not in vars(type(self)):
            raise _undecorated_error(self)
        try:
            init(self, *args, **kwargs)
        except dataclasses.FrozenInstanceError as error:
            error.add_note(
                f"{described.__name__} is a frozen dataclass, whose fields replace an __init__ that assigns them: "
                "write `name: type`, or `name: type = default`, in the class."
            )
            raise
        except TypeError:
            if (explained := constructor_error(described, init, args, kwargs)) is not None:
                raise explained from None
            raise
        if type(self) is described:  # a subclass is finalized once, when all of its fields are set
            _finalize(self)

    described.__init__ = finalized_init
    described.__eq__ = _equal
    described.__hash__ = _cached_hash
    described.__reduce__ = _reduce
    described.__copy__ = described.__deepcopy__ = _return_self
    if described.__repr__ is object.__repr__:
        described.__repr__ = _repr
    for name, value in list(vars(described).items()):
        if isinstance(value, types.FunctionType) and not name.startswith("__"):
            setattr(described, name, _SharedMethod(value))
    return described


def fields_of(description: Any) -> dict[str, Any]:
    """The fields of a description by name, in order."""
    return {field.name: getattr(description, field.name) for field in dataclasses.fields(description)}


def with_fields(description: D, **changes: Any) -> D:
    """A copy of a description with some fields changed, checked like a new one."""
    values = fields_of(description)
    unknown = changes.keys() - values.keys()
    if unknown:
        raise TypeError(unknown_field_message(short_repr(description), unknown, values))
    return _rebuild(type(description), {**values, **changes})


def check_sizes(description: Any) -> None:
    """Raise unless each `Size` of a description is set."""
    for name, kind, _ in _checked_fields(type(description)):
        if kind is Size:
            _check_size(description, name, getattr(description, name))


class FrozenDict(Mapping[str, Any]):
    """A dict of descriptions as the value of a field: immutable and hashable, in the order given."""

    def __init__(self, items: Mapping[str, Any]):
        self._items = dict(items)

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


class _SharedMethod:
    """A method whose bound method is the same object for all equal descriptions.

    Python compares bound methods by the identity of `self`, and JAX's compilation caches hold their callable
    weakly; so the bound methods are cached here, as many as JAX caches compilations.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, description: Any, owner: type | None = None) -> Any:
        return self.function if description is None else _bound(self.function, description)


@functools.lru_cache(maxsize=4096)
def _bound(function: Callable[..., Any], description: Any) -> types.MethodType:
    return types.MethodType(function, description)


def _check_fields_before(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(post_init)
    def checked(self: Any) -> None:
        _freeze_dicts(self)
        _convert_numpy_scalars(self)
        _comparison_values(self)
        if hasattr(type(self), "fwd"):  # an optimizer says itself what it accepts
            _check_values(self, (float, int))
        post_init(self)

    return checked


def _finalize(self: Any) -> None:
    _freeze_dicts(self)
    _convert_numpy_scalars(self)
    _comparison_values(self)
    for name, kind, default in _checked_fields(type(self)):
        value = getattr(self, name)
        if kind is DType and value is not None:
            object.__setattr__(self, name, _dtype_name(self, name, value))
        elif kind is Size:
            if value is not None:  # None: a composite infers it from its input, see `infer_sizes`
                _check_size(self, name, value)
        elif kind is not DType and not _is_instance(kind, value) and value is not default:
            wanted = {bool: "True or False", int: "an integer"}.get(kind) or f"a tuple, such as ({value!r},)"
            raise TypeError(f"{type(self).__name__}: field `{name}` is {value!r}, but must be {wanted}.")
    for name, kind, default in _description_fields(type(self)):
        _check_instance(self, name, kind, default)
    _check_values(self, (float, int, str, Literal, Callable))
    object.__setattr__(self, "_key", _comparison_values(self))
    object.__setattr__(self, "_hash", hash((type(self), self._key)))


@functools.cache
def _checked_fields(cls: type) -> list[tuple[str, Any, Any]]:
    """(name, type, default) of the fields whose annotation is one of the types checked here."""
    kinds = [(field.name, _checked_type(field.type), field.default) for field in dataclasses.fields(cls)]
    return [each for each in kinds if each[1] is not None]


def _checked_type(annotation: Any) -> Any:
    if isinstance(annotation, str):
        return {"DType": DType, "Size": Size, "bool": bool, "int": int}.get(annotation)
    if any(annotation is kind for kind in (DType, Size, bool, int)):
        return annotation
    return tuple if getattr(annotation, "__origin__", None) is tuple else None


@functools.cache
def _annotations(cls: type) -> dict[str, Any]:
    """The annotations of a class and its bases, evaluated if they are strings."""
    annotations: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        with contextlib.suppress(Exception):  # a name that only the function around the class knows
            annotations |= inspect.get_annotations(base, eval_str=True)
    return annotations


@functools.cache
def _description_fields(cls: type) -> list[tuple[str, type, Any]]:
    """(name, class, default) of the fields that must hold a description, or a tuple of them."""
    kinds = [(field.name, _description_type(_annotations(cls).get(field.name)), field.default) for field in fields(cls)]
    return [(name, kind, default) for name, kind, default in kinds if kind is not None]


@functools.cache
def _value_fields(cls: type) -> list[tuple[str, tuple[Any, ...], Any]]:
    """(name, alternatives, default) of the fields that hold numbers, strings, functions or one of some values."""
    found: list[tuple[str, tuple[Any, ...], Any]] = []
    for field in fields(cls):
        annotation = _annotations(cls).get(field.name)
        union = get_origin(annotation) in (Union, types.UnionType)
        alternatives = get_args(annotation) if union else (annotation,)
        if any(each is float or each is str or get_origin(each) in (Literal, Callable) for each in alternatives) or (
            union and set(alternatives) == {int, types.NoneType}
        ):
            found.append((field.name, alternatives, field.default))
    return found


def _check_values(self: Any, kinds: tuple[Any, ...]) -> None:
    """Raise for a value of another type than its field is annotated with, in fields for any of `kinds`."""
    for name, alternatives, default in _value_fields(type(self)):
        value = getattr(self, name)
        if not any(kind in kinds or get_origin(kind) in kinds for kind in alternatives):
            continue
        found = [_accepts(kind, value) for kind in alternatives]
        if value is default or None in found or any(found):
            continue
        words = " or ".join(_describe_type(kind) for kind in alternatives)
        raise TypeError(f"{type(self).__name__}: field `{name}` is {value!r}, but must be {words}.")


def _accepts(kind: Any, value: Any) -> bool | None:
    """Whether a value has the annotated type; None for an annotation that is not checked."""
    if kind is types.NoneType:
        return value is None
    if kind in (float, int):
        return isinstance(value, (float, int) if kind is float else int) and not isinstance(value, bool)
    if get_origin(kind) is Literal:
        return any(type(value) is type(each) and value == each for each in get_args(kind))
    if get_origin(kind) is Callable:
        return callable(value)
    return isinstance(value, kind) if kind in (str, bool, tuple) else None


def _describe_type(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    names = {types.NoneType: "None", float: "a number", int: "an integer", str: "a string", bool: "True or False"}
    return "a function" if get_origin(kind) is Callable else names.get(kind, getattr(kind, "__name__", str(kind)))


def _description_type(annotation: Any) -> type | None:
    """The class of descriptions in `C`, `C | None` or `tuple[C, ...]`; None for any other annotation."""
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        inner = [each for each in get_args(annotation) if each not in (types.NoneType, Ellipsis)]
        annotation = inner[0] if len(inner) == 1 else None
    return annotation if isinstance(annotation, type) and hasattr(annotation, "__dataclass_fields__") else None


def _check_instance(self: Any, name: str, kind: type, default: Any) -> None:
    value = getattr(self, name)
    if value is None or value is default:
        return
    for each in value if isinstance(value, tuple) else (value,):
        if not isinstance(each, kind):
            raise TypeError(wrong_instance_message(type(self).__name__, f"field `{name}`", each, kind))


def _is_instance(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _check_size(self: Any, name: str, value: Any) -> None:
    if not _is_instance(int, value) or value < 1:
        fault = ValueError if _is_instance(int, value) else TypeError
        raise fault(f"{type(self).__name__}: {name} is {value!r}, but must be an integer of at least 1.")


def _dtype_name(self: Any, name: str, value: Any) -> str:
    try:
        return jnp.dtype(value).name
    except TypeError:
        raise TypeError(not_a_dtype_message(type(self).__name__, f"field `{name}`", value)) from None


def _freeze_dicts(self: Any) -> None:
    """Make a dict of descriptions immutable, in a class that allows one."""
    for name, value in fields_of(self).items() if getattr(self, "has_dict_fields", False) else ():
        if isinstance(value, dict) and all(hasattr(each, "_hash") for each in value.values()):
            object.__setattr__(self, name, FrozenDict(value))


def _convert_numpy_scalars(self: Any) -> None:
    """Store numbers of NumPy, such as those of `np.linspace`, as Python's."""
    for name, value in fields_of(self).items():
        plain = _plain_number(value)
        if plain is not value:
            object.__setattr__(self, name, plain)


def _plain_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        number = value.item()
        return number if isinstance(number, bool | int | float) else value
    if type(value) is tuple:
        items = tuple(map(_plain_number, value))
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    return value


def _comparison_values(self: Any) -> tuple[Any, ...]:
    return tuple(_comparison_value(self, name, value) for name, value in fields_of(self).items())


def _comparison_value(self: Any, name: str, value: Any) -> Any:
    """The value by which a field is compared; raises for what a description cannot hold."""
    if isinstance(value, tuple):
        return type(value), tuple(_comparison_value(self, name, item) for item in value)
    if isinstance(value, FrozenDict):
        return FrozenDict, tuple((key, _comparison_value(self, name, item)) for key, item in value.items())
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        raise TypeError(
            f"{type(self).__name__}: field `{name}` is an array ({type(value).__name__}), but a description "
            "holds plain Python values only; pass a number or a tuple, or create the array in `init`."
        )
    if isinstance(value, float):
        return float, value.hex()  # distinguishes -0.0 from 0.0, and NaN equals itself
    try:
        hash(value)
    except TypeError:
        pairs = "a dict may hold layers only" if getattr(self, "has_dict_fields", False) else "pass a tuple of pairs"
        one = hasattr(_annotations(type(self)).get(name), "fwd")  # a field for one layer
        advice = {
            list: "pass one layer, such as mlax.Series(*layers)" if one else "pass a tuple",
            dict: pairs,
            set: "pass a frozenset",
        }
        raise TypeError(
            f"{type(self).__name__}: field `{name}` is a {type(value).__name__}, which is not hashable; "
            f"{advice.get(type(value), 'pass a hashable value')}."
        ) from None
    return type(value), value


def _equal(self: Any, other: object) -> Any:
    if self is other:
        return True
    if type(self) is not type(other):
        return NotImplemented
    return self._hash == other._hash and self._key == other._key  # pyright: ignore[reportAttributeAccessIssue]


def _cached_hash(self: Any) -> int:
    try:
        return self._hash
    except AttributeError:  # its class has an __init__ that bypasses frozen's
        raise _undecorated_error(self) from None


def _undecorated_error(self: Any) -> TypeError:
    return TypeError(f"{type(self).__name__} is not a description yet; put @mlax.frozen above the class.")


def _reduce(self: Any) -> tuple[Any, ...]:
    return _rebuild, (type(self), fields_of(self))  # rebuilt, since hashes differ between processes


def _return_self(self: Any, memo: Any = None) -> Any:
    return self  # immutable, and a copied function would not be equal


def _rebuild(cls: type, values: dict[str, Any]) -> Any:
    self: Any = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(self, name, value)
    if hasattr(self, "__post_init__"):
        self.__post_init__()
    _finalize(self)
    return self


def _repr(self: Any) -> str:
    return call_repr(type(self).__name__, repr_arguments(self))


def repr_arguments(description: Any) -> list[tuple[str, Any]]:
    """(prefix, value) of each argument of its repr: required fields, then by name those that are not the default.

    A class whose constructor takes other arguments than its fields lists them in the method `_arguments`.
    """
    if hasattr(description, "_arguments"):
        return type(description)._arguments(description)
    arguments: list[tuple[str, Any]] = []
    for field in sorted(dataclasses.fields(description), key=lambda field: field.kw_only is True):
        value = getattr(description, field.name)
        if field.name == SURGERY:
            continue
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            arguments.append(("", value))
        elif field.default_factory is dataclasses.MISSING and value != field.default:
            arguments.append((f"{field.name}=", value))
    return arguments


def call_repr(name: str, arguments: Iterable[tuple[str, Any]], brackets: str = "()") -> str:
    """`name(arguments)` from (prefix, value) pairs, on one line, or with a line for each argument if that is long."""
    words = [f"{prefix}{value_repr(value)}" for prefix, value in arguments]
    middle = len(brackets) // 2
    line = f"{name}{brackets[:middle]}{', '.join(words)}{brackets[middle:]}"
    if len(line) <= 100 and "\n" not in line:
        return line
    body = textwrap.indent(",\n".join(words), "    ")
    return f"{name}{brackets[:middle]}\n{body},\n{brackets[middle:]}"


def value_repr(value: Any) -> str:
    """The repr of a field's value; of a function, its name."""
    return function_name(value) if callable(value) else repr(value)
