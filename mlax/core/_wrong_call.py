"""The words for a description that is made with arguments it does not take."""

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

_ELSEWHERE = {  # what other libraries call a field that has another name here
    "betas": "b1",
    "dim": "width",
    "embedding_dim": "width",
    "hidden_size": "features",
    "in_channels": "features",
    "in_features": "features",
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

_SURGERY = "edits"  # the field of a composite that is set by surgery and never by hand


def wrong_call(cls: type, init: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> TypeError | None:
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
            return TypeError(no_field(cls.__name__, unknown, [*placed, *options]))
        if len(args) > len(placed):
            read = " The sizes of the input are read from the input." if hasattr(cls, "fwd") else ""
            return TypeError(f"{cls.__name__} takes {takes} by position, but {len(args)} came{by_name}.{read}")
        return TypeError(f"{cls.__name__}: {error}; it takes {takes}{by_name}.")
    return None


def no_field(what: str, unknown: Iterable[str], fields: Iterable[str]) -> str:
    """The words for names that are no fields, with those there are and the closest."""
    unknown, fields = sorted(unknown), [name for name in fields if name != _SURGERY]
    near = [close for name in unknown if (close := _closest(name, fields))]
    hint = f" Did you mean {', '.join(dict.fromkeys(near))}?" if near else ""
    return f"{what} has no field {', '.join(unknown)}; it has {', '.join(fields) or 'none'}.{hint}"


def _closest(name: str, fields: list[str]) -> str | None:
    if _ELSEWHERE.get(name) in fields:
        return _ELSEWHERE[name]
    return next(iter(difflib.get_close_matches(name, fields, n=1)), None)
