"""Error messages: where in a model an error was raised, and which fields a description takes."""

import contextlib
import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax


@contextlib.contextmanager
def error_scope(name: str, x: Any) -> Iterator[None]:
    """Enter the named scope `name`; an error raised inside gets a note with the path of the layer.

    The innermost part adds the note, with what it was called on: `in blocks/3/norm, called on float32[8, 16, 32]`.
    Each part around it prepends its name to the path.
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


@contextlib.contextmanager
def locate_nan_in_scan(
    step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, length: int, *, reverse: bool = False
) -> Iterator[None]:
    """Around a scan: if `jax_debug_nans` raises, apply the steps one by one, so that the error names one of them.

    Each step is in a scope with its index: `in blocks/3/norm, called on float32[8, 16]`.
    """
    try:
        yield
    except FloatingPointError:
        for index in reversed(range(length)) if reverse else range(length):
            with error_scope(str(index), carry):
                carry, _ = step(carry, jax.tree.map(lambda leaf, index=index: leaf[index], xs))
        raise


def short_repr(description: Any) -> str:
    """The repr of a description, or `Series(...)` if it is long."""
    text = repr(description)
    return text if len(text) <= 60 else f"{type(description).__name__}(...)"


def short_signature(x: Any) -> str:
    """The signature of a pytree, or its type if that is long."""
    text = signature(x)
    return text if len(text) <= 60 else f"a {type(x).__name__}"


def signature(x: Any) -> str:
    """Shapes and dtypes of a pytree: `float32[8, 16]`, or `(float32[8, 16], int32[8])`."""
    if isinstance(x, dict):
        return "{" + ", ".join(f"{key}: {signature(value)}" for key, value in x.items()) + "}"
    if isinstance(x, list | tuple):
        return "(" + ", ".join(signature(value) for value in x) + ")"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}[{', '.join(str(size) for size in x.shape)}]"
    if isinstance(x, type):
        return f"the class {x.__name__}"
    return repr(x) if x is None or isinstance(x, bool | int | float) else f"a {type(x).__name__}"


def is_like_first(y: Any, x: Any) -> bool:
    """Whether `x` is a tuple of several inputs, and `y` has the shapes and dtypes of the first."""
    return isinstance(x, tuple) and len(x) > 1 and signature(y) == signature(x[0])


def not_a_dtype_message(owner: str, what: str, value: Any) -> str:
    """The sentence for a field or an argument that should be a dtype."""
    advice = "pass a name such as 'bfloat16' or a dtype such as jnp.float32."
    return f"{owner}: {what} is {value!r}, which is not a dtype; {advice}"


def wrong_instance_message(owner: str, what: str, value: Any, wanted: type) -> str:
    """The message for a value that is not an instance of the description class wanted, with what to write instead."""
    name, kind = getattr(value, "__name__", None), "layer" if wanted.__name__ == "Layer" else wanted.__name__
    article = "an" if kind[0] in "AEIOU" else "a"
    got, advice = f"a {type(value).__name__}", f"pass {'a layer' if kind == 'layer' else f'{article} mlax {kind}'}."
    if isinstance(value, type) and hasattr(value, "__dataclass_fields__"):
        parameters = inspect.signature(value).parameters.values()
        given = "..." if any(each.default is each.empty for each in parameters) else ""
        got, advice = f"the class {name}", f"did you mean {name}({given})?"
    elif hasattr(type(value), "__dataclass_fields__"):
        got = short_repr(value)
    elif callable(value):
        got = f"the function {name}" if name else got
        advice = f"wrap it: mlax.F({name or '...'})." if kind == "layer" else advice
    elif isinstance(value, list | tuple | dict) and kind == "layer":
        stars = "**" if isinstance(value, dict) else "*"
        advice = f"pass the layers themselves: mlax.Series({stars}layers)."
    return f"{owner}: {what} is {got}, which is not {article} {kind}; {advice}"


_FIELDS_ELSEWHERE = {  # a field's name in other libraries: its name here
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
_INFERRED = {"in_channels", "in_features", "input_size", "normalized_shape", "num_features"}  # from the input
_SIZES = "Input sizes are inferred from the input."
SURGERY = "edits"  # the field of a composite that only surgery sets


def constructor_error(
    cls: type, init: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> TypeError | None:
    """The TypeError for arguments that `init` does not accept; None if it accepts them."""
    signature = inspect.signature(init)
    try:
        signature.bind(None, *args, **named)
    except TypeError as error:
        _, *parameters = signature.parameters.values()
        positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        options = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.name != SURGERY]
        takes = ", ".join(positional) or "nothing"
        by_name = f"; options are keyword-only: {', '.join(options)}" if options else ""
        unknown = [name for name in named if name not in signature.parameters]
        if unknown:
            return TypeError(unknown_field_message(cls.__name__, unknown, [*positional, *options]))
        if len(args) > len(positional):
            sizes = hasattr(cls, "fwd") and all(isinstance(each, int) for each in args)
            hint = f" {_SIZES}" if sizes else ""
            if sizes and len(positional) == 1 and str(parameters[0].annotation).startswith("tuple["):
                hint = f" Did you mean {cls.__name__}({args})?"
            return TypeError(f"{cls.__name__} takes {takes} by position, but got {len(args)} arguments{by_name}.{hint}")
        return TypeError(f"{cls.__name__}: {error}; it takes {takes}{by_name}.")
    return None


def unknown_field_message(what: str, unknown: Iterable[str], fields: Iterable[str]) -> str:
    """The message for unknown field names, with the fields there are and the closest match."""
    unknown, fields = sorted(unknown), [name for name in fields if name != SURGERY]
    near = [close for name in unknown if name not in _INFERRED and (close := _closest(name, fields))]
    hint = f" Did you mean {', '.join(dict.fromkeys(near))}?" if near else ""
    sizes = f" {_SIZES}" if _INFERRED.intersection(unknown) else ""
    return f"{what} has no field {', '.join(unknown)}; it has {', '.join(fields) or 'none'}.{hint}{sizes}"


def missing_name_message(module: str, name: str, names: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    """The error for a name that a module lacks; `elsewhere` says what to write for names of other libraries."""
    if name.startswith("_"):
        return f"{module} has no {name}."
    by_letters = {each.replace("_", "").lower(): each for each in names}
    same = by_letters.get(name.replace("_", "").lower())
    close = [same] if same else difflib.get_close_matches(name, list(by_letters.values()), n=3, cutoff=0.7)
    if name in elsewhere:
        advice = f"write {elsewhere[name]}."
    else:
        advice = f"did you mean {' or '.join(close)}?" if close else f"dir({module}) lists what it has."
    return f"{module} has no {name}; {advice}"


def _closest(name: str, fields: list[str]) -> str | None:
    here = _FIELDS_ELSEWHERE.get(name)
    if here is not None and set(here.split(", ")) <= set(fields):
        return here
    return next(iter(difflib.get_close_matches(name, fields, n=1)), None)
