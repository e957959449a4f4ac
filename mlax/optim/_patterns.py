"""Patterns: which leaves something is for, by path."""

import dataclasses
import functools
import typing
from typing import Any

Patterns = str | tuple[str, ...]  # a field annotated so takes one pattern or several, and holds a tuple of them


def settle_patterns(description: Any) -> None:
    """Hold one pattern as a tuple of one, and refuse what is neither."""
    for name in _fields(type(description)):
        given = getattr(description, name)
        if isinstance(given, str):
            object.__setattr__(description, name, (given,))
        elif given is not None and not (isinstance(given, tuple) and all(isinstance(each, str) for each in given)):
            raise TypeError(
                f"{type(description).__name__}: {name} is {given!r}, but must be a pattern or a tuple of them, as "
                "'**/bias' is one."
            )


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    hints = typing.get_type_hints(kind)
    return tuple(field.name for field in dataclasses.fields(kind) if hints[field.name] in (Patterns, Patterns | None))
