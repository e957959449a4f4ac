"""Fingerprints: what a run is about, as short texts that differ if another experiment is continued in its folder.

A fingerprint maps names to texts: of the objective, its constants and the model, of the key, the first weights and the
data. What cannot be determined is left out, and compares equal to anything.
"""

import argparse
import dataclasses
import dis
import enum
import functools
import importlib.util
import inspect
import itertools
import operator
import platform
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax import random

from mlax._jax import is_typed_key, leaves_with_paths
from mlax.core import Layer
from mlax.train._state import TrainState
from mlax.train.feeds._source import ArraySource

Fingerprint = dict[str, Any]

MAX_HASHED_BYTES = 1 << 28  # of an array; of a larger one, blocks at equal distances
SAMPLED_ROWS = 16  # of a source whose arrays are not at hand
SAMPLED_LEAVES, SAMPLED_VALUES = 16, 4  # of the weights
MAX_CHANGE = 400  # characters of a value in a message about a change
KEY = "the key of the state"
WEIGHTS = "the first weights"  # compared within a tolerance, as devices round differently
ABSENT = "none"  # of a function that the feed may have
UNKNOWN = b"unknown"


def fingerprint(objective: Callable[..., Any], state: TrainState, feed: Any, feeds: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint of a run that starts with this state; `feeds` are those of its evaluations, by name.

    What was donated has no values any more, and is not compared. Whether a leaf that a step returns unchanged, such as
    the key, is donated with the others depends on the version of JAX.
    """
    found = describe_objective(objective)
    for name in ("map_example", "map_batch"):
        function = getattr(feed, name, None)
        found |= (
            {f"{name} of the feed": ABSENT} if function is None else _describe_function(function, f"{name} of the feed")
        )
    evaluated = {f"the data of evaluations{f' ({name})' if name else ''}": each for name, each in feeds.items()}
    for name, data in {"the data": feed, **evaluated}.items():
        if (digest := _hash_source(getattr(data, "source", None))) is not None:
            found[name] = f"{type(data).__name__} #{digest}"
    if not _is_deleted(state.rng):
        found[KEY] = f"{random.key_impl(state.rng)} {random.key_data(state.rng).tolist()}"
    if not _is_deleted(state.step) and int(state.step) == 0:  # the weights of a later state are not the first
        found[WEIGHTS] = _sample_weights(state.trainables)
    return found


def describe_objective(objective: Callable[..., Any]) -> Fingerprint:
    """The part of the fingerprint about the objective: its code, constants and model."""
    return _describe_function(objective, "the objective")


def differences(before: Mapping[str, Any], now: Fingerprint) -> Iterator[tuple[str, str, str]]:
    """The name of each difference, with what it was and what it is."""
    for name, new in now.items():
        old = before.get(name)
        if isinstance(new, str) and isinstance(old, str) and _comparable(old, new) != _comparable(new, old):
            yield name, old, new
        elif isinstance(new, dict) and isinstance(old, dict):
            paths = [path for path in new if path in old and not _are_close(old[path], new[path])]
            yield from ((name, f"{path} {old[path]}", f"{new[path]}") for path in paths[:1])


def describe_change(name: str, old: str, new: str) -> str:
    """A difference in words."""
    old, new = (text.split(" #")[0] for text in (old, new))
    is_plural = name == WEIGHTS or name.startswith("the data")
    if old == new:
        return f"{name} {'have' if is_plural else 'has'} changed"
    old, new = _differing_words(old, new)
    was, is_now = ("were", "are now") if is_plural else ("was", "is now")
    return f"{name} {was} {_shorten(old)} and {is_now} {_shorten(new)}"


def _differing_words(old: str, new: str) -> Iterator[str]:
    """Both texts without their common beginning and end, except for two words before the difference."""
    texts = old.split(), new.split()
    head = _common_prefix_length(*texts)
    tail = _common_prefix_length(*(text[head:][::-1] for text in texts))
    head = max(head - 2, 0)
    for text in texts:
        yield " ".join(["..."] * (head > 0) + text[head : len(text) - tail] + ["..."] * (tail > 0))


def _common_prefix_length(old: list[str], new: list[str]) -> int:
    return sum(itertools.accumulate(map(operator.eq, old, new), operator.and_))


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_CHANGE else f"{text[: MAX_CHANGE - 4]} ..."


def _comparable(text: str, other: str) -> str:
    """The words of a text, and its hash if the same version of Python compiled what was hashed."""
    (words, _, digest), (_, _, others) = text.partition(" #"), other.partition(" #")
    return text if digest.partition(" ")[2] == others.partition(" ")[2] else words


def _are_close(old: Any, new: list[float]) -> bool:
    """Whether samples agree, as far as both were taken, up to the rounding of different devices."""
    try:
        pairs = np.array(list(zip(old, new, strict=False)), np.float64).reshape(-1, 2)
    except (TypeError, ValueError):
        return True  # damaged, so unknown
    return bool(np.allclose(pairs[:, 0], pairs[:, 1], rtol=1e-2, atol=1e-6))


# Functions and values


class _Seen:
    """The digests of the objects that were visited, None while they are, kept alive so that no id is used again."""

    def __init__(self):
        self.objects: dict[int, tuple[Any, str | None]] = {}


def _describe_function(function: Any, name: str) -> Fingerprint:
    """A function by its code, and what it refers to by name: constants, descriptions and other functions."""
    function, bound = _unwrap(function)
    if not isinstance(function, types.FunctionType):
        return {}
    seen = _Seen()
    found: Fingerprint = {name: f"code #{_hash(_code_parts(function.__code__))} {_python()}"}
    for variable, value in itertools.chain(bound, _references(function)):
        if (text := _describe_value(value, seen)) is not None:
            found[f"{name}: {variable}"] = text
    return found


def _python() -> str:
    """The version of Python: another one compiles the same source to other instructions."""
    return "Python " + ".".join(platform.python_version_tuple()[:2])


def _describe_value(value: Any, seen: _Seen) -> str | None:
    """A value in words, followed by a hash of what the words leave out; None if it cannot be hashed."""
    if isinstance(value, bool | int | float | complex | str | None):
        return repr(value)
    try:
        parts = list(_parts(value, seen))
    except Exception:  # objects may do anything when they are looked at, and no run should fail because of it
        return None
    if UNKNOWN in parts:
        return None
    words = repr(value) if isinstance(value, Layer) else type(value).__name__
    return f"{words} #{_hash(parts)} {_python()}"


def _parts(value: Any, seen: _Seen) -> Iterator[bytes]:
    """Bytes that differ where two values do; of what cannot be compared, UNKNOWN."""
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        yield f"{type(value).__name__} {value!r}".encode()
    elif (found := seen.objects.get(id(value))) is not None:
        yield (found[1] or "a cycle").encode()
    else:
        seen.objects[id(value)] = value, None
        try:
            parts = list(_compound_parts(value, seen))
        except Exception:
            del seen.objects[id(value)]
            raise
        digest = "unknown" if parts == [UNKNOWN] else _hash(parts)
        seen.objects[id(value)] = value, digest
        yield digest.encode()


def _compound_parts(value: Any, seen: _Seen) -> Iterator[bytes]:
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        yield _array_digest(value)
    elif isinstance(value, enum.Enum):
        yield f"{type(value).__qualname__}.{value.name}".encode()
    elif isinstance(value, tuple | list):
        yield f"{len(value)} items".encode()
        yield from itertools.chain.from_iterable(_parts(each, seen) for each in value)
    elif isinstance(value, set | frozenset):
        yield from sorted(_hash(_parts(each, seen)).encode() for each in value)
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(_parts(each, seen) for pair in value.items() for each in pair)
    elif isinstance(value, argparse.Namespace | types.SimpleNamespace):
        yield from _parts(vars(value), seen)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _parts(type(value), seen)
        for field in dataclasses.fields(value):
            each = getattr(value, field.name, None)
            if not _is_default(each, field.default):  # a later version may add fields
                yield field.name.encode()
                yield from _parts(each, seen)
    elif isinstance(value, type):
        yield _name_of(value)
        for name in (name for base in value.__mro__ if not _is_library(base.__module__) for name in vars(base)):
            if isinstance(method := getattr(value, name, None), types.FunctionType | types.MethodType):
                yield from (name.encode(), *_parts(method, seen))
    elif callable(value):
        yield from _callable_parts(value, seen)
    else:
        yield UNKNOWN


def _callable_parts(value: Any, seen: _Seen) -> Iterator[bytes]:
    opaque = _is_library(getattr(value, "__module__", None)) and not hasattr(value, "__self__")
    function, bound = (value, []) if opaque and not isinstance(value, functools.partial) else _unwrap(value)
    yield from itertools.chain.from_iterable(_parts(each, seen) for _, each in bound)
    if not isinstance(function, types.FunctionType) or _is_library(function.__module__):
        yield _name_of(function)
        return
    yield from _code_parts(function.__code__)
    for name, each in _references(function):
        yield name.encode()
        yield from _parts(each, seen)


def _unwrap(function: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """The plain function inside of methods, partial, jitted and callable objects, and the values bound to it."""
    bound: list[tuple[str, Any]] = []
    while not isinstance(function, types.FunctionType | type):
        if isinstance(function, functools.partial):
            bound += [(f"argument {at}", value) for at, value in enumerate(function.args)]
            bound += list(function.keywords.items())
            function = function.func
        elif isinstance(function, types.MethodType):
            bound.append(("self", function.__self__))
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif isinstance(call := vars(type(function)).get("__call__"), types.FunctionType):
            bound.append(("self", function))
            function = call
        else:
            break
    return function, bound


def _references(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The names and values of what a function refers to: defaults, variables of its closure and globals."""
    code = function.__code__
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    closure = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}  # not the unassigned
    yield from dict(_loaded_values(code, closure, function.__globals__)).items()


def _loaded_values(
    code: types.CodeType, closure: Mapping[str, Any], variables: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """What code loads from its closure and globals; of modules and configurations, the attributes that it reads."""
    instructions = list(dis.get_instructions(code))
    for at, instruction in enumerate(instructions):
        scope = {"LOAD_GLOBAL": variables, "LOAD_NAME": variables, "LOAD_DEREF": closure}.get(instruction.opname, {})
        name = instruction.argval
        if not isinstance(name, str) or name not in scope:
            continue
        value = scope[name]
        for following in instructions[at + 1 :]:
            if following.opname not in ("LOAD_ATTR", "LOAD_METHOD") or not _is_namespace(value):
                break
            name, value = f"{name}.{following.argval}", getattr(value, following.argval, None)
        if not isinstance(value, types.ModuleType):
            yield name, value
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _loaded_values(constant, closure, variables)


def _is_namespace(value: Any) -> bool:
    """Whether only the attributes that code reads matter: of the user's modules and configurations."""
    if isinstance(value, types.ModuleType):
        return not _is_library(value.__name__)
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type | Layer)


def _code_parts(code: types.CodeType) -> Iterator[bytes]:
    """The instructions, names and constants of code, without its docstring and its place in a file."""
    yield code.co_code
    yield repr((code.co_names, code.co_varnames, code.co_freevars)).encode()
    for constant in code.co_consts[_has_docstring_slot(code) :]:
        if isinstance(constant, types.CodeType):
            yield from _code_parts(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(constant, key=repr)).encode()
        else:
            yield repr(constant).encode()


def _has_docstring_slot(code: types.CodeType) -> bool:
    """Whether the first constant is the docstring, or None in its place."""
    if sys.version_info >= (3, 14):
        return bool(code.co_flags & inspect.CO_HAS_DOCSTRING)
    return not code.co_name.startswith("<") and isinstance(code.co_consts[0], str | None)  # no lambda, no comprehension


def _name_of(value: Any) -> bytes:
    """The package and the name of a function or class of a library; its modules may move."""
    package = str(getattr(value, "__module__", "")).partition(".")[0]
    return f"{package} {getattr(value, '__qualname__', type(value).__qualname__)}".encode()


def _is_default(value: Any, default: Any) -> bool:
    try:
        return value is default or (type(value) is type(default) and bool(value == default))
    except (TypeError, ValueError):  # arrays
        return False


@functools.cache
def _is_library(module: str | None) -> bool:
    """Whether a module belongs to mlax, an installed package or Python itself, whose code is known by its name."""
    package = (module or "builtins").partition(".")[0]
    if package in ("mlax", "builtins"):
        return True
    try:
        spec = None if package == "__main__" else importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return False
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return spec.origin in ("built-in", "frozen") or any(Path(spec.origin).is_relative_to(each) for each in folders)


# Arrays


def _hash_source(source: Any) -> str | None:
    """A hash of the examples; None if they cannot be read twice alike."""
    if source is None:
        return None
    if isinstance(source, ArraySource) and all(isinstance(array, np.ndarray) for array in source.arrays.values()):
        return _hash(_array_digest(array) for array in source.arrays.values())
    ids = np.unique(np.linspace(0, len(source) - 1, SAMPLED_ROWS, dtype=np.int64))
    try:
        first, second = (_hash_rows(source[ids]) for _ in range(2))
    except Exception:  # reading is the feed's task, and it says what is wrong
        return None
    return first if first == second else None


def _hash_rows(rows: Mapping[str, Any]) -> str:
    return _hash(_array_digest(np.asarray(rows[name])) for name in sorted(rows))


def _array_digest(array: Any) -> bytes:
    """A hash of an array, of blocks of it if it is large; by its shape and dtype alone if it is not in memory."""
    outline = f"{getattr(array, 'dtype', '')}{getattr(array, 'shape', '')}"
    if _is_deleted(array):
        raise ValueError("a donated array has no values")
    if isinstance(array, jax.Array) and array.is_fully_addressable:
        array = np.asarray(random.key_data(array) if is_typed_key(array) else array)
    if not isinstance(array, np.ndarray | np.generic) or array.dtype.hasobject:
        return outline.encode()
    return f"{outline} {_hash(_byte_blocks(np.asarray(array)))}".encode()


def _byte_blocks(array: np.ndarray) -> Iterator[memoryview]:
    if array.nbytes <= MAX_HASHED_BYTES:
        yield _as_bytes(array)
        return
    rows = max(1, MAX_HASHED_BYTES // 64 * len(array) // array.nbytes)
    for start in np.linspace(0, len(array) - rows, 64, dtype=np.int64):
        yield _as_bytes(array[start : start + rows])


def _as_bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _sample_weights(trainables: Any) -> dict[str, list[float]]:
    """The first values of some kernels by path, read without computing on the devices."""
    floats = [(path, leaf) for path, leaf in leaves_with_paths(trainables) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    leaves = [(path, leaf) for path, leaf in floats if not _is_deleted(leaf)]
    leaves.sort(key=lambda pair: (pair[1].ndim < 2, pair[1].size))  # vectors are often constant; small ones are cheap
    samples = {path: _first_values(leaf) for path, leaf in leaves[:SAMPLED_LEAVES]}
    return {path: values for path, values in samples.items() if values}


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _first_values(leaf: Any) -> list[float]:
    """The first values along the last axis, as far as a shard holds them; none if it is in another process."""
    shards = leaf.addressable_shards if isinstance(leaf, jax.Array) else []
    first = [shard.data for shard in shards if all((part.start or 0) == 0 for part in shard.index)]
    if not first and isinstance(leaf, jax.Array):
        return []
    row = np.asarray(first[0] if first else leaf)[(0,) * max(leaf.ndim - 1, 0)].reshape(-1) if leaf.size else ()
    return [float(f"{float(value):.6g}") for value in row[:SAMPLED_VALUES]]


def _hash(parts: Iterable[Any]) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:16]
