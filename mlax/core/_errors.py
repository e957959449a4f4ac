"""Error messages: where in a model an error was raised, and which fields a description takes."""

import contextlib
import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax


@contextlib.contextmanager
def error_scope(name: str, x: Any) -> Iterator[None]:
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


def short_repr(description: Any) -> str:
    """A description in a sentence: as it is written, or `Series(...)` where that would fill the line."""
    written = repr(description)
    return written if len(written) <= 60 else f"{type(description).__name__}(...)"


def short_signature(x: Any) -> str:
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


_ELSEWHERE = {  # what other libraries call a field that has another name here
    "betas": "b1, b2",
    "dim": "width",
    "embedding_dim": "width",
    "hidden_size": "features",
    "kernel_size": "window",
    "learning_rate": "rate",
    "lr": "rate",
    "num_embeddings": "vocabulary",
    "num_heads": "heads",
    "out_channels": "features",
    "out_features": "features",
    "p": "rate",
    "weight_decay": "decay",
}
_READ = {"in_channels", "in_features", "input_size", "normalized_shape", "num_features"}  # off the input, by layers
_SIZES = "The sizes of the input are read from the input."
_SURGERY = "edits"  # the field of a composite that is set by surgery and never by hand


def constructor_error(
    cls: type, init: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> TypeError | None:
    """The error for a call whose arguments `init` does not take; None if it takes them."""
    signature = inspect.signature(init)
    try:
        signature.bind(None, *args, **named)
    except TypeError as error:
        _, *parameters = signature.parameters.values()
        placed = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        options = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.name != _SURGERY]
        takes = ", ".join(placed) or "nothing"
        by_name = f"; options go by keyword: {', '.join(options)}" if options else ""
        unknown = [name for name in named if name not in signature.parameters]
        if unknown:
            return TypeError(unknown_field_message(cls.__name__, unknown, [*placed, *options]))
        if len(args) > len(placed):
            sizes = hasattr(cls, "fwd") and all(isinstance(each, int) for each in args)
            hint = f" {_SIZES}" if sizes else ""
            return TypeError(f"{cls.__name__} takes {takes} by position, but {len(args)} came{by_name}.{hint}")
        return TypeError(f"{cls.__name__}: {error}; it takes {takes}{by_name}.")
    return None


def unknown_field_message(what: str, unknown: Iterable[str], fields: Iterable[str]) -> str:
    """The words for names that are no fields, with those there are and the closest."""
    unknown, fields = sorted(unknown), [name for name in fields if name != _SURGERY]
    near = [close for name in unknown if name not in _READ and (close := _closest(name, fields))]
    hint = f" Did you mean {', '.join(dict.fromkeys(near))}?" if near else ""
    sizes = f" {_SIZES}" if _READ.intersection(unknown) else ""
    return f"{what} has no field {', '.join(unknown)}; it has {', '.join(fields) or 'none'}.{hint}{sizes}"


def _closest(name: str, fields: list[str]) -> str | None:
    here = _ELSEWHERE.get(name)
    if here is not None and set(here.split(", ")) <= set(fields):
        return here
    return next(iter(difflib.get_close_matches(name, fields, n=1)), None)
