"""Where in a model an error arose, as a note on the error."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


@contextlib.contextmanager
def located(name: str, x: Any) -> Iterator[None]:
    """Trace under the scope `name`; an error that passes gets `name` in front of the path in its note.

    The innermost part writes the note and says what it was called on: `in blocks/3/norm, called on
    float32[8, 16, 32]`. Each part around it only lengthens the path.
    """
    try:
        with jax.named_scope(name):
            yield
    except Exception as error:
        notes: list[str] = getattr(error, "__notes__", [])
        inner = [i for i, note in enumerate(notes) if note.startswith("in ") and ", called on " in note]
        if inner:
            notes[inner[-1]] = f"in {name}/{notes[inner[-1]].removeprefix('in ')}"
        else:
            error.add_note(f"in {name}, called on {signature(x)}")
        raise


def brief(description: Any) -> str:
    """A description in a sentence: as it is written, or `Series(...)` where that would fill the line."""
    written = repr(description)
    return written if len(written) <= 60 else f"{type(description).__name__}(...)"


def brief_signature(x: Any) -> str:
    """Shapes and dtypes of a tree, or its type alone where these would fill the line."""
    written = signature(x)
    return written if len(written) <= 60 else f"a {type(x).__name__}"


def signature(x: Any) -> str:
    """Shapes and dtypes of a tree, in short: `float32[8, 16]`, or `(float32[8, 16], int32[8])`."""
    if isinstance(x, dict):
        return "{" + ", ".join(f"{key}: {signature(value)}" for key, value in x.items()) + "}"
    if isinstance(x, list | tuple):
        return "(" + ", ".join(signature(value) for value in x) + ")"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}[{', '.join(str(size) for size in x.shape)}]"
    return repr(x) if x is None or isinstance(x, bool | int | float) else f"a {type(x).__name__}"
