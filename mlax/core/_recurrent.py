"""Recurrent: a cell over the time axis."""

import abc
from typing import Any

import jax
from jax import lax

from mlax.core._frozen import frozen
from mlax.core._layer import Layer, Tree, structs
from mlax.core._notes import brief, signature
from mlax.core._wrapper import Wrapper


@frozen
class Cell(Layer):
    """One step in time: a layer from (carry, x) to (carry, y), where x and y are of one time step, (b, ...)."""

    @abc.abstractmethod
    def start(self, x: Any) -> Any:
        """The carry before the first step, for a step's input like `x`."""


@frozen
class Recurrent(Wrapper):
    """Apply a cell to each time step of x (b, t, ...) in turn, carrying its state along: y (b, t, ...).

    Variables: those of the cell, the same at every step. `reverse` goes from the last step to the first.
    `unroll` steps are compiled side by side. With `carry=True` the input is (carry, x) and the output (carry, y).
    """

    layer: Cell
    axis: int = 1
    reverse: bool = False
    unroll: int = 1
    carry: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.layer, Cell):
            raise TypeError(f"Recurrent: {self.layer!r} is no mlax.Cell; it needs `start` beside `init` and `fwd`.")

    def init(self, rng, x):
        carry, x = x if self.carry else (None, x)
        step = jax.eval_shape(lambda x: jax.tree.map(lambda leaf: leaf.take(0, self.axis), x), x)
        return self.layer.init(rng, (carry if self.carry else self._start(step), step))

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        carry, x = x if self.carry else (None, x)
        x = jax.tree.map(lambda leaf: jax.numpy.moveaxis(leaf, self.axis, 0), x)  # (t, b, ...)
        if not self.carry:
            carry = self.layer.start(jax.tree.map(lambda leaf: leaf[0], x))
        times = jax.tree.leaves(x)[0].shape[0]
        keys = None if rng is None else jax.random.split(rng, times)

        def step(before: tuple[Any, Tree], now: tuple[Any, jax.Array | None]) -> tuple[tuple[Any, Tree], Any]:
            carry, state = before
            out, state = self.layer.fwd((carry, now[0]), trainables, state, rng=now[1], inference_mode=inference_mode)
            after, y = out
            if signature(after) != signature(carry):
                raise ValueError(
                    f"{brief(self)}: the cell turns a carry of {signature(carry)} into {signature(after)}; "
                    "it must return one like the one it was given."
                )
            return (after, state), y

        (carry, state), y = lax.scan(step, (carry, non_trainables), (x, keys), reverse=self.reverse, unroll=self.unroll)
        y = jax.tree.map(lambda leaf: jax.numpy.moveaxis(leaf, 0, self.axis), y)
        return ((carry, y) if self.carry else y), state

    def _start(self, step: Any) -> Any:
        return structs(jax.eval_shape(self.layer.start, step))
