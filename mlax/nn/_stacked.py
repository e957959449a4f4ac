"""Stacked: recurrent layers one above the other, over sequences of different lengths."""

from collections.abc import Mapping
from typing import Any, Self

from mlax.core import Composite, Layer, Recurrent, Sub, frozen, with_fields
from mlax.nn._bidirectional import Bidirectional


@frozen
class Stacked(Composite):
    """Apply each layer to the output of the one below it, and hand the carries and lengths to those that take them.

    x (b, t, ...) to what the last layer gives. With `lengths=True` the input is (x, lengths); with `carry=True` it is
    (carries, x) or (carries, x, lengths), a tuple with one carry for each recurrent layer, and the output
    (carries, y). The recurrent layers, each `Recurrent` or `Bidirectional`, must all be built for the same. Between
    them may stand any others, `Dropout` say. Parts: layer_0, layer_1 and so on. Without carries and lengths, `Series`
    does the same.
    """

    layers: tuple[Layer, ...]
    carry: bool = False
    lengths: bool = False

    def __init__(self, *layers: Layer, carry: bool = False, lengths: bool = False):
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "carry", carry)
        object.__setattr__(self, "lengths", lengths)
        self.__post_init__()

    def __post_init__(self) -> None:
        for layer in self.layers:
            inner = _recurrent(layer)
            if inner is not None and (inner.carry, inner.lengths) != (self.carry, self.lengths):
                raise ValueError(
                    f"Stacked: carry={self.carry} and lengths={self.lengths}, but a layer has carry={inner.carry} and "
                    f"lengths={inner.lengths}; give all the same."
                )

    def parts(self) -> Mapping[str, Layer]:
        return {f"layer_{place}": layer for place, layer in enumerate(self.layers)}

    def with_parts(self, parts: Mapping[str, Layer]) -> Self:
        return with_fields(self, layers=tuple({**self.parts(), **parts}.values()))

    def wire(self, sub: Sub, x: Any) -> Any:
        given, *lengths = x[self.carry :] if self.carry or self.lengths else (x,)
        before, after = iter(x[0]) if self.carry else None, []
        for layer, part in zip(self.layers, sub, strict=True):
            if _recurrent(layer) is None:
                given = part(given)
            elif before is None:
                given = part((given, *lengths) if lengths else given)
            else:
                carry, given = part((next(before), given, *lengths))
                after.append(carry)
        return (tuple(after), given) if self.carry else given

    def __repr__(self) -> str:
        told = [f"{name}=True" for name in ("carry", "lengths") if getattr(self, name)]
        return f"Stacked({', '.join([*map(repr, self.layers), *told])})"


def _recurrent(layer: Layer) -> Recurrent | None:
    layer = layer.forward if isinstance(layer, Bidirectional) else layer
    return layer if isinstance(layer, Recurrent) else None
