"""Cell: one step in time, as `Recurrent` takes it."""

import abc
from typing import Any

from mlax.core._composite import Composite
from mlax.core._frozen import frozen
from mlax.core._layer import Layer
from mlax.core._parts import Sub


@frozen
class Cell(Layer):
    """One step in time: a layer from (carry, x) to (carry, y), where x and y are of one time step, (b, ...)."""

    @abc.abstractmethod
    def start(self, x: Any) -> Any:
        """The carry before the first step, for a step's input of the shape and dtype of `x`."""


@frozen
class CompositeCell(Composite, Cell):
    """A cell made of parts, written in two halves: `ahead`, which needs no carry, and `step`, which does.

    `Recurrent` computes `ahead` for all time steps at once, and the gradients of the weights in `step` too: of
    each part, one product for the whole sequence. The cell alone is one after the other.
    """

    @abc.abstractmethod
    def ahead(self, sub: Sub, x: Any) -> Any:
        """What of a step needs its input (b, ...) only."""

    @abc.abstractmethod
    def step(self, sub: Sub, carry: Any, ahead: Any) -> tuple[Any, Any]:
        """The next carry and the output (b, ...), from the carry and what `ahead` gave for this step."""

    def wire(self, sub: Sub, x: Any) -> tuple[Any, Any]:
        carry, x = x
        return self.step(sub, carry, self.ahead(sub, x))
