"""The parts of a composite: which they are, and how its `wire` calls them."""

import ast
import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mlax.core._layer import Layer
from mlax.core._notes import brief, located


class Sub:
    """The parts of one composite during one call of its `wire`: `sub.name(x)` or `sub[name](x)`.

    It hands each part its variables and its key, and collects the part's new state.
    """

    def __init__(self, composite: Any, call: Callable[[str, Layer, Any], Any], inference_mode: bool):
        self._composite = composite
        self._call = call
        self.inference_mode = inference_mode

    def __getitem__(self, name: str) -> Callable[[Any], Any]:
        parts = parts_of(self._composite)
        if name not in parts:
            close = difflib.get_close_matches(name, parts, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise AttributeError(
                f"{brief(self._composite)} has no part {name!r}; its parts are {', '.join(parts) or 'none'}.{hint}"
            )

        def part(x: Any) -> Any:
            with located(name, x):
                return self._call(name, parts[name], x)

        return part

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        return self[name]

    def __iter__(self) -> Iterator[Callable[[Any], Any]]:
        return (self[name] for name in parts_of(self._composite))


@functools.lru_cache(maxsize=4096)
def parts_of(composite: Any) -> Mapping[str, Layer]:
    """The parts of a composite, edits included, checked once for each distinct description."""
    _refuse_repeated_names(type(composite))
    parts = {**composite.parts(), **dict(composite.edits)}
    for name, part in parts.items():
        if not name.isidentifier() or name.startswith("_") or name == "inference_mode":
            raise ValueError(
                f"{brief(composite)}: {name!r} cannot name a part; use an identifier without a leading underscore, "
                "other than inference_mode, since `wire` calls it as sub.name."
            )
        refuse_other_than_layer(brief(composite), f"part {name!r}", part)
    return parts


def refuse_other_than_layer(whose: str, what: str, part: Any) -> None:
    """Refuse a part that is no layer, with what it takes to make one of it."""
    if isinstance(part, Layer):
        return
    name = getattr(part, "__name__", None)
    came, advice = f"a {type(part).__name__}", "pass a layer."
    if isinstance(part, type) and issubclass(part, Layer):
        given = "..." if any(each.default is each.empty for each in inspect.signature(part).parameters.values()) else ""
        came, advice = f"the class {name}", f"did you mean {name}({given})?"
    elif callable(part):
        came, advice = f"the function {name}" if name else came, f"wrap it: mlax.F({name or '...'})."
    elif isinstance(part, list | tuple | dict):
        stars = "**" if isinstance(part, dict) else "*"
        advice = f"pass the layers themselves: mlax.Series({stars}layers)."
    raise TypeError(f"{whose}: {what} is {came}, which is no layer; {advice}")


@functools.cache
def _refuse_repeated_names(cls: type) -> None:
    """Refuse a `parts` that writes one name twice: Python would drop the first part without a word."""
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(cls.parts)))  # pyright: ignore
    except (OSError, TypeError, SyntaxError):
        return  # no source to read, as at a prompt
    for node in ast.walk(source):
        names = [key.value for key in getattr(node, "keys", []) if isinstance(key, ast.Constant)]
        for name in names:
            if isinstance(node, ast.Dict) and names.count(name) > 1:
                raise ValueError(f"{cls.__name__}: `parts` has two parts named {name!r}; rename one.")
