"""The command `mlax inspect`: the summary of a model that a Python file builds, and its report."""

import inspect
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mlax.cli._script import load_script

DEFAULT_DTYPE = "float32"


def inspect_model(target: str, shape: Sequence[str], dtype: Sequence[str], inference: bool, report: str | None) -> int:
    """Print the summary of a model, or the cost of a function, and write its report if that is asked for."""
    path, name = _split_target(target)
    subject, arguments = _unpack(_build(path, name), target)
    from mlax import inspect as inspection  # imports JAX, so only when it is needed
    from mlax.core import Layer

    if isinstance(subject, Layer):
        arguments = (_input(target, arguments, shape, dtype),)
        _explain(lambda: print(inspection.summary(subject, *arguments, inference_mode=inference)))
    elif shape:
        raise SystemExit(f"mlax inspect: {name} builds a function, not a model, so --shape does not apply.")
    else:
        _explain(lambda: print(inspection.cost(subject, *arguments), inspection.memory(subject, *arguments), sep="\n"))
    if report is not None:
        _explain(lambda: print(f"wrote {inspection.report(report, subject, *arguments)}"))
    return 0


def _split_target(target: str) -> tuple[Path, str]:
    file, colon, name = target.rpartition(":")
    path = Path(file if colon else target)
    if not path.is_file():
        raise SystemExit(f"mlax inspect: there is no file {path}; the call is mlax inspect FILE.py:FUNCTION.")
    if not colon or not name.isidentifier():
        raise SystemExit(
            f"mlax inspect: {target} does not say what builds the model; add the name of a function of that file: "
            f"mlax inspect {path}:build."
        )
    return path, name


def _build(path: Path, name: str) -> Any:
    """What a function of a file returns; or the value of that name, if it is not a function."""
    module = load_script(path)
    if not hasattr(module, name):
        functions = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        close = get_close_matches(name, functions, n=1) or functions[:5]
        hint = f"; there is {', '.join(close)}" if close else ""
        raise SystemExit(f"mlax inspect: {path} has no {name!r}{hint}.")
    build = getattr(module, name)
    if not inspect.isroutine(build) and not inspect.isclass(build):
        return build
    required = [
        each.name
        for each in inspect.signature(build).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if required:
        raise SystemExit(
            f"mlax inspect: {name} needs {', '.join(required)}; write a function without parameters that calls it, "
            f"such as `def build(): return {name}(...), jnp.zeros((8, 16))`, and pass that."
        )
    return build()


def _unpack(built: Any, target: str) -> tuple[Any, tuple[Any, ...]]:
    """A model or a function, and its arguments."""
    from mlax.core import Layer, short_repr

    subject, *arguments = built if isinstance(built, tuple) and built else (built,)
    if isinstance(subject, Layer) or (callable(subject) and arguments):
        return subject, tuple(arguments)
    raise SystemExit(
        f"mlax inspect: {target} gives {short_repr(built)}, but must give a model, a model and an input, or a function "
        "and its arguments."
    )


def _input(target: str, arguments: tuple[Any, ...], shape: Sequence[str], dtype: Sequence[str]) -> Any:
    """The input of the model: that of --shape and --dtype, or that which was built with it."""
    given: Any = arguments[0] if arguments else None
    if len(arguments) > 1:
        raise SystemExit(f"mlax inspect: {target} gives a model and {len(arguments)} inputs; pass them as one tuple.")
    if not shape and given is None:
        raise SystemExit(
            f"mlax inspect: {target} gives a model without an input; pass the shape of one: --shape 8,28,28,1."
        )
    if not shape:
        return given
    import jax

    kinds = [*dtype, *[dtype[-1] if dtype else DEFAULT_DTYPE] * len(shape)]
    inputs = [
        jax.ShapeDtypeStruct(_parse_shape(sizes), _parse_dtype(kind)) for sizes, kind in zip(shape, kinds, strict=False)
    ]
    return tuple(inputs) if len(inputs) > 1 else inputs[0]


def _parse_shape(text: str) -> tuple[int, ...]:
    sizes = [each.strip() for each in text.strip("()[] ").split(",") if each.strip()]
    if not all(each.isdecimal() for each in sizes):
        raise SystemExit(f"mlax inspect: --shape {text} is not a shape; write sizes with commas: --shape 8,28,28,1.")
    return tuple(map(int, sizes))


def _parse_dtype(text: str) -> Any:
    import jax.numpy as jnp

    try:
        return jnp.dtype(text)
    except TypeError:
        raise SystemExit(f"mlax inspect: --dtype {text} is not a dtype; use float32, bfloat16 or int32, say.") from None


def _explain(action: Any) -> None:
    """Run an action; an error about the input of the model ends the command with its message."""
    try:
        action()
    except (TypeError, ValueError) as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        raise SystemExit(f"mlax inspect: {error}{notes}") from error
