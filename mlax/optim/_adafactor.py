"""Adafactor: the mean square of a matrix, kept as its rows and its columns."""

import jax
import jax.numpy as jnp
from jax import lax

from mlax.core import frozen
from mlax.optim._base import Leafwise
from mlax.optim._hyperparams import NonNegative, Patterns, Rate
from mlax.optim._slots import Slot
from mlax.optim._trees import moving_average


@frozen
class Adafactor(Leafwise):
    """Gradients over the root of a mean square that is a product of two vectors, in steps relative to the weights.

    The two longest axes are factored, if both are at least `smallest` long. A step is `rate`, at most `1 / sqrt(t)`,
    times the root mean square of the weights, at least `scale_eps`; its own is clipped to `clip`. `decayed` as in
    `AdamW`. Slots: rows, which keeps all axes but the last of the two, and columns, all but the first; square, where
    nothing is factored. Algorithms 4 and 5 of https://arxiv.org/abs/1804.04235
    """

    rate: Rate = 0.01
    power: NonNegative = 0.8
    eps: NonNegative | None = None  # None: that of the dtype
    scale_eps: NonNegative = 1e-3
    clip: NonNegative = 1.0
    decay: NonNegative = 0.0
    decayed: Patterns | None = None
    smallest: int = 1

    def keeps(self, path, w):
        factored = self._factored(w.shape)
        if factored is None:
            return {"square": Slot(wide=True)}
        row, column = factored
        axes = range(len(w.shape))
        return {
            "rows": Slot(tuple(axis for axis in axes if axis != column), wide=True),
            "columns": Slot(tuple(axis for axis in axes if axis != row), wide=True),
        }

    def step(self, now, g, w, slots):
        eps = float(jnp.finfo(g.dtype).eps) if self.eps is None else now.eps
        new = 1 - (now.t**-now.power).astype(g.dtype)  # how much of the old stays
        square = g * g
        if "square" in slots:
            kept = {"square": moving_average(slots["square"], square, new)}
            estimate = kept["square"]
        else:
            row, column = self._factored(w.shape) or (0, 1)
            rows = moving_average(slots["rows"], jnp.mean(square, column), new)
            columns = moving_average(slots["columns"], jnp.mean(square, row), new)
            kept = {"rows": rows, "columns": columns}
            size = jnp.mean(rows, row - (column < row), keepdims=True)
            share = rows / jnp.maximum(size, eps)
            estimate = jnp.expand_dims(share, column) * jnp.expand_dims(columns, row)
        step = g * lax.rsqrt(jnp.maximum(estimate, eps * eps))
        step = step / jnp.maximum(_rms(step) / now.clip, 1.0)
        rate = jnp.minimum(now.rate, (now.t**-0.5).astype(g.dtype))
        size = jnp.maximum(_rms(w), now.scale_eps)
        return w - rate * size * step - now.rate * now.decay * w, kept

    def _factored(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The two longest axes in order, the later ones of equals; None if there are not two that long."""
        if len(shape) < 2:
            return None
        first, second = sorted(sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))[-2:])
        return None if min(shape[first], shape[second]) < self.smallest else (first, second)


def _rms(x: jax.Array) -> jax.Array:
    return lax.sqrt(jnp.mean(x * x))
