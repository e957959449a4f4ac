"""Residual: a layer's output added to its input."""

from dataclasses import KW_ONLY
from typing import Any

import jax

from mlax.core._composite import Composite
from mlax.core._frozen import frozen
from mlax.core._layer import Layer
from mlax.core._notes import brief, signature
from mlax.core._parts import Sub, refuse_other_than_layer


@frozen
class Residual(Composite):
    """Add the output of `layer` to the input, or to `shortcut` of the input where the shapes differ."""

    layer: Layer
    _: KW_ONLY
    shortcut: Layer | None = None

    def __post_init__(self) -> None:
        refuse_other_than_layer("Residual", "layer", self.layer)
        if self.shortcut is not None:
            refuse_other_than_layer("Residual", "shortcut", self.shortcut)

    def wire(self, sub: Sub, x: Any) -> Any:
        y = sub.layer(x)
        if self.shortcut is not None:
            x = sub.shortcut(x)
        if signature(x) != signature(y):
            raise ValueError(
                f"{brief(self)}: the output is {signature(y)} but what it is added to is {signature(x)}; "
                "give a shortcut layer that makes them alike."
            )
        return jax.tree.map(lambda a, b: a + b, x, y)
