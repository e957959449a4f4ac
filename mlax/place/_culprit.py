"""Culprit: which array a transfer that JAX refused was about, found in the variables around the line that failed."""

import contextlib
import linecache
import math
import os
import re
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer


class Refused(NamedTuple):
    """What JAX says of a transfer that it refused: a shape and where to, but no name."""

    source: str  # "host" or "device"
    target: str
    dtype: str | None  # None: JAX does not say
    shape: tuple[int, ...]
    devices: int  # that it would go to


def refused(error: Exception) -> Refused | None:
    """What an error says of a refused transfer; None if it is another error."""
    text = str(error)
    ways = re.search(r"Disallowed (\w+)-to-(\w+) transfer", text)
    if not ways:
        return None
    array = re.search(r"ShapedArray\((\w+)(?:<\w+>)?\[([\d,]*)\]", text)
    mesh = re.search(r"Mesh\(([^()]*)", text)
    return Refused(
        source=ways[1],
        target=ways[2],
        dtype=array[1] if array else None,
        shape=tuple(int(size) for size in array[2].split(",") if size) if array else (),
        devices=math.prod(int(size) for size in re.findall(r"'\: (\d+)", mesh[1])) if mesh else 1,
    )


def names(error: Exception, found: Refused) -> list[str]:
    """The paths of the arrays that it may be about, like `batch/image`: one as a rule, none if it has no name.

    What JAX holds in its hands when it fails is the array itself, unless it has hidden its frames from the traceback;
    then it is one of that shape that the line that failed speaks of.
    """
    frames = list(zip(traceback.walk_tb(error.__traceback__), traceback.extract_tb(error.__traceback__), strict=True))
    held = [leaf for (frame, _), _ in frames if _is_in(frame, _JAX) for _, leaf in _arrays(frame, found)]
    named = [
        (path, leaf, path.split("/")[0] in _words(line))
        for (frame, _), line in frames
        if not _is_in(frame, (*_JAX, _HERE))
        for path, leaf in _arrays(frame, found)
    ]
    exact = [each for each in named if found.shape and any(each[1] is leaf for leaf in held)]  # numbers are shared
    for chosen in ([each for each in exact if each[2]], exact, [each for each in named if each[2]]):
        if chosen:
            once = {id(leaf): path for path, leaf, _ in reversed(chosen)}  # by the name of the outermost frame
            return list(once.values())[::-1]
    return []


def line_of(error: Exception) -> str:
    """The innermost line that is neither of JAX nor of this library, or else the outermost of all."""
    lines = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not _is_in(frame, (*_JAX, _MLAX, _PYTHON))
    ]
    frame, line = lines[-1] if lines else next(traceback.walk_tb(error.__traceback__))
    return f"{os.path.basename(frame.f_code.co_filename)}:{line} ({frame.f_code.co_name})"


def _is_in(frame: FrameType, folders: tuple[str, ...]) -> bool:
    return os.path.abspath(frame.f_code.co_filename).startswith(folders)


def _arrays(frame: FrameType, found: Refused) -> Iterator[tuple[str, Any]]:
    """The arrays in a frame's variables that it may be about, by path."""
    for name, value in list(frame.f_locals.items()):
        yield from ((path, leaf) for path, leaf in _leaves(value, name) if _may_be(leaf, found))


def _leaves(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The leaves of dicts, lists and tuples; not as JAX's trees, since a variable may be anything, or hold itself."""
    if depth > 8:
        return
    if isinstance(value, dict):
        inside: Any = list(value.items())
    elif isinstance(value, list | tuple):
        inside = zip(getattr(value, "_fields", range(len(value))), value, strict=False)
    else:
        yield path, value
        return
    for name, each in inside:
        yield from _leaves(each, f"{path}/{name}", depth + 1)


def _may_be(leaf: Any, found: Refused) -> bool:
    kinds = (jax.Array,) if found.source == "device" else (np.ndarray, np.generic, float, int)
    if not isinstance(leaf, kinds) or isinstance(leaf, Tracer):
        return False
    if found.source == found.target and getattr(leaf, "committed", False):
        return False  # JAX moves no array from where it was put on purpose
    dtype = leaf.dtype if isinstance(leaf, jax.Array) else jax.dtypes.canonicalize_dtype(np.result_type(leaf))
    return found.dtype is None or (str(dtype), np.shape(leaf)) == (found.dtype, found.shape)


def _words(line: traceback.FrameSummary) -> set[str]:
    first = line.lineno or 0
    source = (linecache.getline(line.filename, number) for number in range(first, (line.end_lineno or first) + 1))
    return set(re.findall(r"\w+", " ".join(source)))


def _parent(file: str, levels: int) -> str:
    for _ in range(levels):
        file = os.path.dirname(os.path.abspath(file))
    return os.path.join(file, "")


_HERE, _MLAX = _parent(__file__, 1), _parent(__file__, 2)
_JAX = (_parent(jax.__file__, 1), os.path.join(_parent(jax.__file__, 2), "jaxlib", ""))
_PYTHON = contextlib.__file__  # what is between a `with` and its block
