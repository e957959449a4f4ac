"""Wrapper: a layer around one other layer, with that layer's variables and no level of its own in their tree."""

from typing import Any

from mlax.core._frozen import frozen
from mlax.core._layer import Layer, Tree
from mlax.core._parts import refuse_other_than_layer


@frozen
class Wrapper(Layer):
    """A layer that changes how another one is computed and not what it owns: write `fwd`.

    Variables: those of `layer`, under the same paths, so wrapping a part never moves a variable.
    """

    layer: Layer

    def __post_init__(self) -> None:
        refuse_other_than_layer(type(self).__name__, "layer", self.layer)

    def init(self, rng, x):
        return self.layer.init(rng, x)

    def check_variables(self, x: Any, trainables: Tree, non_trainables: Tree) -> None:
        """Nothing: the layer inside checks its own."""
