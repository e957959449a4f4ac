"""The words for a description that is made with arguments it does not take."""

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

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
            sizes = hasattr(cls, "fwd") and all(isinstance(each, int) for each in args)
            hint = f" {_SIZES}" if sizes else ""
            return TypeError(f"{cls.__name__} takes {takes} by position, but {len(args)} came{by_name}.{hint}")
        return TypeError(f"{cls.__name__}: {error}; it takes {takes}{by_name}.")
    return None


def no_field(what: str, unknown: Iterable[str], fields: Iterable[str]) -> str:
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
