"""F, Series, Parallel, Residual: layers from functions and from other layers."""

import collections
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY
from typing import Any, Self

import jax

from mlax.core._composite import Composite, Sub, check_layer
from mlax.core._errors import short_repr, signature
from mlax.core._frozen import frozen, with_fields
from mlax.core._layer import Layer


@frozen
class F(Layer):
    """Apply a function of the input: `F(jax.nn.relu)`.

    A function with a parameter named `rng` or `inference_mode` is given that too, by name. Functions are equal
    when they are the same object: name a function rather than write a lambda anew in each description.
    """

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        if isinstance(self.function, Layer):
            raise TypeError(f"F: {self.function} is a layer already; use it as it is.")
        if not callable(self.function):
            raise TypeError(f"F: {self.function!r} is not a function; F takes a function of the input.")

    def init(self, rng, x):
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        offered = {"rng": rng, "inference_mode": inference_mode}
        given = {name: value for name, value in offered.items() if name in _parameters(self.function)}
        if rng is None and "rng" in given and "inference_mode" not in given:
            raise ValueError(f"{short_repr(self)}: the function takes a key and there is none; pass rng= to fwd.")
        return self.function(x, **given), non_trainables


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return set()


@frozen
class Series(Composite):
    """Apply each layer to the output of the one before it.

    Layers given by keyword are parts of that name. The others are named by their class and their rank in it,
    `linear_0`, `linear_1`: name the parts of a model that will be edited, since an inserted layer moves them.
    """

    named: tuple[tuple[str, Layer], ...]

    def __init__(self, *layers: Layer, **named: Layer):
        object.__setattr__(self, "named", _named(type(self), layers, named))

    def parts(self) -> Mapping[str, Layer]:
        return dict(self.named)

    def with_parts(self, parts: Mapping[str, Layer]) -> Self:
        return with_fields(self, named=tuple({**self.parts(), **parts}.items()))

    def wire(self, sub: Sub, x: Any) -> Any:
        for part in sub:
            x = part(x)
        return x

    def __repr__(self) -> str:
        return _written(self)


@frozen
class Parallel(Composite):
    """Apply each layer to the same input: a tuple of their outputs, in order. Parts are named as in Series."""

    named: tuple[tuple[str, Layer], ...]

    def __init__(self, *layers: Layer, **named: Layer):
        object.__setattr__(self, "named", _named(type(self), layers, named))

    def parts(self) -> Mapping[str, Layer]:
        return dict(self.named)

    def with_parts(self, parts: Mapping[str, Layer]) -> Self:
        return with_fields(self, named=tuple({**self.parts(), **parts}.items()))

    def wire(self, sub: Sub, x: Any) -> tuple[Any, ...]:
        return tuple(part(x) for part in sub)

    def __repr__(self) -> str:
        return _written(self)


def _named(cls: type, layers: tuple[Layer, ...], named: dict[str, Layer]) -> tuple[tuple[str, Layer], ...]:
    seen = collections.Counter[str]()
    parts: dict[str, Layer] = {}
    for rank, layer in enumerate(layers):
        check_layer(cls.__name__, f"layer {rank}", layer)
        kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(layer).__name__).lower()
        parts[f"{kind}_{seen[kind]}"] = layer
        seen[kind] += 1
    for name, layer in named.items():
        check_layer(cls.__name__, name, layer)
        if name in parts:
            raise ValueError(f"{cls.__name__}: two parts are named {name!r}; rename one.")
    return (*parts.items(), *named.items())


def _written(self: Series | Parallel) -> str:
    return f"{type(self).__name__}({', '.join(f'{name}={part}' for name, part in self.named)})"


@frozen
class Residual(Composite):
    """Add the output of `layer` to the input, or to `shortcut` of the input where the shapes differ."""

    layer: Layer
    _: KW_ONLY
    shortcut: Layer | None = None

    def __post_init__(self) -> None:
        check_layer("Residual", "layer", self.layer)
        if self.shortcut is not None:
            check_layer("Residual", "shortcut", self.shortcut)

    def wire(self, sub: Sub, x: Any) -> Any:
        y = sub.layer(x)
        if self.shortcut is not None:
            x = sub.shortcut(x)
        if signature(x) != signature(y):
            raise ValueError(
                f"{short_repr(self)}: the output is {signature(y)} but what it is added to is {signature(x)}; "
                "give a shortcut layer that makes them alike."
            )
        return jax.tree.map(lambda a, b: a + b, x, y)
