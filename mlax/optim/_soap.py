"""SOAP: Adam in the basis in which Shampoo would precondition."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlax._jax import with_auto_axes
from mlax.core import frozen
from mlax.optim._adam import adam, adam_direction
from mlax.optim._base import Leafwise
from mlax.optim._hyperparams import Beta, Hyperparams, NonNegative, Patterns, Rate
from mlax.optim._slots import Slot
from mlax.optim._trees import moving_average


@frozen
class SOAP(Leafwise):
    """AdamW whose mean square is kept, and whose step is taken, in the eigenbases of `g g'` and `g' g`.

    These are averaged by `b2`, and their bases refreshed every `every` steps by one power iteration. A leaf of more
    than two axes is a matrix of its first against the others; a side longer than `largest` keeps its own basis, and
    a vector is AdamW's. `decayed` as there. Slots: mean; square, in the bases; left and right, (rows, rows) and
    (columns, columns); left_basis and right_basis, alike. Algorithm 3 of https://arxiv.org/abs/2409.11321. The first
    gradient of a matrix only tells the bases, as in the authors' code: in its own it would be rounding errors for the
    most part, which Adam would blow up.
    """

    rate: Rate
    b1: Beta = 0.95
    b2: Beta = 0.95
    eps: NonNegative = 1e-8
    decay: NonNegative = 0.01
    decayed: Patterns | None = None
    every: int = 10
    largest: int = 10_000

    def keeps(self, path, w):
        kept = {"mean": Slot(), "square": Slot(wide=True)}
        if len(w.shape) < 2:
            return kept
        rows, columns = w.shape[0], math.prod(w.shape[1:])
        if rows <= self.largest:
            kept |= dict.fromkeys(("left", "left_basis"), Slot((0, None), (rows,), wide=True))
        if columns <= self.largest:
            axes = (1, None) if len(w.shape) == 2 else (None, None)
            side = Slot(axes, (columns,) * axes.count(None), wide=True)
            kept |= dict.fromkeys(("right", "right_basis"), side)
        return kept

    def step(self, now, g, w, slots):
        if not {"left", "right"} & slots.keys():
            step, kept = adam(now, g, slots)
            return w - now.rate * now.decayed(step, w), kept
        arrays = {name: value for name, value in now.values.items() if isinstance(value, jax.Array)}

        def turned(step: jax.Array, arrays: dict[str, jax.Array], g: jax.Array, slots: Any) -> Any:
            return self._turned(dataclasses.replace(now, step=step, values={**now.values, **arrays}), g, slots)

        step, kept = with_auto_axes(turned, now.step, arrays, g, dict(slots), like=(g, dict(slots)))
        return jnp.where(now.step == 0, w, w - now.rate * now.decayed(step, w)), kept

    def _turned(
        self, now: Hyperparams, g: jax.Array, slots: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The step of a leaf with bases, and its slots."""
        shape, g = g.shape, g.reshape(g.shape[0], -1)
        products = {"left": lambda: g @ g.T, "right": lambda: g.T @ g}
        sides = {
            name: moving_average(slots[name], product(), now.b2) for name, product in products.items() if name in slots
        }
        bases = {name: slots[f"{name}_basis"] for name in sides}
        mean, square = slots["mean"].reshape(g.shape), slots["square"].reshape(g.shape)

        def told() -> tuple[Any, ...]:
            return jnp.zeros_like(g), mean, square, {name: _eigenbasis(side) for name, side in sides.items()}

        def stepped() -> tuple[Any, ...]:
            later = dataclasses.replace(now, step=now.step - 1)
            new_mean, new_square = (
                moving_average(mean, g, now.b1),
                moving_average(square, _project(g, bases) ** 2, now.b2),
            )
            step = adam_direction(later, _project(new_mean, bases), new_square)
            step = _project(step, {name: basis.T for name, basis in bases.items()})
            due = now.step % self.every == 0
            refreshed = lax.cond(
                due, _refresh_bases, lambda square, bases, _: (square, bases), new_square, bases, sides
            )
            return step, new_mean, *refreshed

        step, mean, square, bases = lax.cond(now.step == 0, told, stepped)
        kept = {"mean": mean.reshape(shape), "square": square.reshape(shape), **sides}
        return step.reshape(shape), kept | {f"{name}_basis": basis for name, basis in bases.items()}


def _project(x: jax.Array, bases: dict[str, jax.Array]) -> jax.Array:
    """`left' x right`, where a side that is missing is the identity."""
    x = bases["left"].T @ x if "left" in bases else x
    return x @ bases["right"] if "right" in bases else x


def _eigenbasis(side: jax.Array) -> jax.Array:
    return jnp.linalg.eigh(side)[1][:, ::-1]


def _refresh_bases(square: jax.Array, bases: dict[str, jax.Array], sides: dict[str, jax.Array]) -> tuple[Any, Any]:
    """The bases one power iteration on, sorted by the eigenvalues they say, and the squares in the same order."""
    new = {}
    for name, basis in bases.items():
        order = jnp.argsort(-jnp.sum(basis * (sides[name] @ basis), 0))
        square = jnp.take(square, order, 0 if name == "left" else 1)
        new[name] = jnp.linalg.qr(sides[name] @ basis[:, order])[0]
    return square, new
