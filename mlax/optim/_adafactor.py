"""Adafactor: the mean square of a matrix, factored into its rows and its columns."""

import jax
import jax.numpy as jnp
from jax import lax

from mlax.core import frozen
from mlax.optim._hyperparams import Count, NonNegative, Patterns, Positive, Rate
from mlax.optim._leafwise import Leafwise
from mlax.optim._slots import Slot
from mlax.optim._trees import moving_average


@frozen
class Adafactor(Leafwise):
    """Adafactor: `g` over the root of a mean square that is factored into two vectors, in steps relative to the
    weights.

    The two longest axes are factored, if both have at least `min_dim_size_to_factor` elements. A step is `rate`, at
    most `1 / sqrt(t)`, times the root mean square (RMS) of the weights, at least `scale_eps`; its RMS is at most
    `clip`. Algorithms 4 and 5 of https://arxiv.org/abs/1804.04235. `decayed` as in `AdamW`. Slots: rows, without the
    second of the factored axes, and columns, without the first; square, for leaves that are not factored.

    >>> optimizer = optim.Adafactor()
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'rows', 'columns')
    """

    rate: Rate = 0.01  # the learning rate, a number or a schedule
    power: NonNegative = 0.8  # of the step in the decay rate of squares
    eps: NonNegative = 1e-15  # the smallest root of a mean square; the paper's is squared, 1e-30
    scale_eps: NonNegative = 1e-3  # the least scale of a parameter
    clip: Positive = 1.0  # the largest root mean square of a step
    decay: NonNegative = 0.0  # the weight decay
    decayed: Patterns | None = None  # patterns of the leaves to decay; None: those named kernel or table
    min_dim_size_to_factor: Count = 1  # smaller axes are not factored

    def leaf_slots(self, path, w):
        factored = self._factored_axes(w.shape)
        if factored is None:
            return {"square": Slot(wide=True)}
        row, column = factored
        axes = range(len(w.shape))
        return {
            "rows": Slot(tuple(axis for axis in axes if axis != column), wide=True),
            "columns": Slot(tuple(axis for axis in axes if axis != row), wide=True),
        }

    def leaf_update(self, now, g, w, slots):
        floor = jnp.maximum(now.eps**2, float(jnp.finfo(g.dtype).tiny))  # of mean squares, and not zero
        beta = 1 - (now.t**-now.power).astype(g.dtype)
        square = g * g
        if "square" in slots:
            new = {"square": moving_average(slots["square"], square, beta)}
            estimate = new["square"]
        else:
            row, column = self._factored_axes(w.shape) or (0, 1)
            rows = moving_average(slots["rows"], jnp.mean(square, column), beta)
            columns = moving_average(slots["columns"], jnp.mean(square, row), beta)
            new = {"rows": rows, "columns": columns}
            mean = jnp.mean(rows, row - (column < row), keepdims=True)
            ratio = rows / jnp.maximum(mean, floor)
            estimate = jnp.expand_dims(ratio, column) * jnp.expand_dims(columns, row)
        step = g * lax.rsqrt(jnp.maximum(estimate, floor))
        step = step / jnp.maximum(_rms(step) / now.clip, 1.0)
        rate = jnp.minimum(now.rate, (now.t**-0.5).astype(g.dtype))
        size = jnp.maximum(_rms(w), now.scale_eps)
        return w - rate * size * step - now.rate * now.decay * w, new

    def _factored_axes(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The two longest axes in order, the last ones among equals; None if one is too short."""
        if len(shape) < 2:
            return None
        first, second = sorted(sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))[-2:])
        return None if min(shape[first], shape[second]) < self.min_dim_size_to_factor else (first, second)


def _rms(x: jax.Array) -> jax.Array:
    return lax.sqrt(jnp.mean(x * x))
