"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlax.core import frozen
from mlax.optim._adam import adam_direction, adam_moments
from mlax.optim._hyperparams import (
    Beta,
    Count,
    Hyperparams,
    NonNegative,
    Patterns,
    PositiveCount,
    Rate,
    check_wide,
    with_auto_axes_at,
)
from mlax.optim._leafwise import Leafwise
from mlax.optim._slots import Slot
from mlax.optim._trees import moving_average

Sides = dict[str, jax.Array]  # a matrix for "left", for "right", or for both


@frozen
class SOAP(Leafwise):
    """SOAP: AdamW with its mean square and its step in the eigenbases of moving averages of `g g'` and `g' g`.

    The averages have the decay rate `b2`; every `every` steps one power iteration updates the bases. A leaf of more
    than two axes is a matrix of its first axis against the others; a side longer than `max_precond_dim` is not rotated,
    and vectors are updated as by AdamW. Algorithm 3 of https://arxiv.org/abs/2409.11321. As in the authors' code, the
    first gradient only initialises the bases: in its own eigenbasis it is mostly rounding errors, which Adam would
    amplify. `decayed` as in `AdamW`. Slots: mean; square, in the eigenbases; left and right, (rows, rows) and
    (columns, columns); left_basis and right_basis, of the same shapes.

    >>> optimizer = optim.SOAP(3e-3)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'square', 'left', 'left_basis', 'right', 'right_basis')
    """

    rate: Rate  # the learning rate, a number or a schedule
    b1: Beta = 0.95  # the decay rate of the mean of gradients
    b2: Beta = 0.95  # the decay rate of the mean of squares
    eps: NonNegative = 1e-8  # added to the denominator
    decay: NonNegative = 0.01  # the weight decay
    decayed: Patterns | None = None  # patterns of the leaves to decay; None: those named kernel or table
    every: PositiveCount = 10  # steps between two updates of the bases
    max_precond_dim: Count = 10_000  # longer sides are not rotated

    def __post_init__(self):
        super().__post_init__()
        check_wide(self)

    def leaf_slots(self, path, w):
        slots = {"mean": Slot(), "square": Slot(wide=True)}
        if len(w.shape) < 2:
            return slots
        rows, columns = w.shape[0], math.prod(w.shape[1:])
        if rows <= self.max_precond_dim:
            slots |= dict.fromkeys(("left", "left_basis"), Slot((0, None), (rows,), wide=True))
        if columns <= self.max_precond_dim:
            axes = (1, None) if len(w.shape) == 2 else (None, None)
            side = Slot(axes, (columns,) * axes.count(None), wide=True)
            slots |= dict.fromkeys(("right", "right_basis"), side)
        return slots

    def leaf_update(self, now, g, w, slots):
        if not {"left", "right"} & slots.keys():
            moments = adam_moments(now, g, slots)
            return w - now.rate * now.add_decay(adam_direction(now, **moments), w), moments
        step, new = with_auto_axes_at(now, self._rotated_step, g, dict(slots), like=(g, dict(slots)))
        return jnp.where(now.step == 0, w, w - now.rate * now.add_decay(step, w)), new

    def _rotated_step(
        self, now: Hyperparams, g: jax.Array, slots: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The step of a leaf with bases, and its new slots."""
        shape, g = g.shape, g.reshape(g.shape[0], -1)
        products = {"left": lambda: g @ g.T, "right": lambda: g.T @ g}
        sides = {name: moving_average(slots[name], products[name](), now.b2) for name in products if name in slots}
        bases = {name: slots[f"{name}_basis"] for name in sides}
        mean, square = slots["mean"].reshape(g.shape), slots["square"].reshape(g.shape)

        def first_step() -> tuple[Any, ...]:
            return jnp.zeros_like(g), mean, square, {name: _eigenbasis(side) for name, side in sides.items()}

        def later_step() -> tuple[Any, ...]:
            since_first = dataclasses.replace(now, step=now.step - 1)
            new_mean = moving_average(mean, g, now.b1)
            new_square = moving_average(square, _rotate(g, bases) ** 2, now.b2)
            step = adam_direction(since_first, _rotate(new_mean, bases), new_square)
            step = _rotate(step, {name: basis.T for name, basis in bases.items()})
            due = now.step % self.every == 0
            updated = lax.cond(due, _update_bases, lambda square, bases, _: (square, bases), new_square, bases, sides)
            return step, new_mean, *updated

        step, mean, square, bases = lax.cond(now.step == 0, first_step, later_step)
        new = {"mean": mean.reshape(shape), "square": square.reshape(shape), **sides}
        return step.reshape(shape), new | {f"{name}_basis": basis for name, basis in bases.items()}


def _rotate(x: jax.Array, bases: Sides) -> jax.Array:
    """`left' x right`, where a missing side is the identity."""
    x = bases["left"].T @ x if "left" in bases else x
    return x @ bases["right"] if "right" in bases else x


def _eigenbasis(side: jax.Array) -> jax.Array:
    return jnp.linalg.eigh(side)[1][:, ::-1]


def _update_bases(square: jax.Array, bases: Sides, sides: Sides) -> tuple[jax.Array, Sides]:
    """The bases after one power iteration, sorted by their estimated eigenvalues, and the squares in that order."""
    new = {}
    for name, basis in bases.items():
        order = jnp.argsort(-jnp.sum(basis * (sides[name] @ basis), 0))
        square = jnp.take(square, order, 0 if name == "left" else 1)
        new[name] = jnp.linalg.qr(sides[name] @ basis[:, order])[0]
    return square, new
