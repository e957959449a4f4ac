"""Cell: one step in time, as `Recurrent` takes it."""

import abc
from typing import Any

import jax

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
    """A cell made of parts, written as what needs no carry, `ahead`, and what does, `feedback` and `step`.

    `Recurrent` computes `ahead` for all time steps at once, and so it does the gradients of all weights: of each
    part, one product for the whole sequence. By itself the cell computes one after the other.
    """

    @abc.abstractmethod
    def ahead(self, sub: Sub, x: Any) -> Any:
        """What of a step needs its input (b, ...) only."""

    def feedback(self, sub: Sub, carry: Any) -> Any:
        """What the carry adds to `ahead`, if anything: like it, or None.

        `step` can do the same for itself; but a sum that is known as such has one gradient instead of two.
        """
        return None

    @abc.abstractmethod
    def step(self, sub: Sub, carry: Any, ahead: Any) -> tuple[Any, Any]:
        """The next carry and the output (b, ...), from the carry and from `ahead` with `feedback` added to it."""

    def wire(self, sub: Sub, x: Any) -> tuple[Any, Any]:
        carry, x = x
        return self.step(sub, carry, added(self.ahead(sub, x), self.feedback(sub, carry)))


def added(ahead: Any, feedback: Any) -> Any:
    """The sum of the two, leaf by leaf, or the first if there is no second."""
    return ahead if feedback is None else jax.tree.map(lambda a, b: a + b, ahead, feedback)
