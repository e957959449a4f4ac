"""Series and Parallel: layers one after the other, or side by side."""

import collections
import re
from collections.abc import Mapping
from typing import Any, Self

from mlax.core._composite import Composite
from mlax.core._frozen import frozen, with_fields
from mlax.core._layer import Layer
from mlax.core._parts import Sub, refuse_other_than_layer


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
        refuse_other_than_layer(cls.__name__, f"layer {rank}", layer)
        kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(layer).__name__).lower()
        parts[f"{kind}_{seen[kind]}"] = layer
        seen[kind] += 1
    for name, layer in named.items():
        refuse_other_than_layer(cls.__name__, name, layer)
        if name in parts:
            raise ValueError(f"{cls.__name__}: two parts are named {name!r}; rename one.")
    return (*parts.items(), *named.items())


def _written(self: Series | Parallel) -> str:
    return f"{type(self).__name__}({', '.join(f'{name}={part}' for name, part in self.named)})"
