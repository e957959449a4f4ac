"""GaLore: AdamW whose moments are stored in a low-rank subspace of the gradient."""

import jax
import jax.numpy as jnp
from jax import lax

from mlax.core import frozen
from mlax.optim._adam import AdamW, adam_direction, adam_moments
from mlax.optim._hyperparams import (
    Hyperparams,
    NonNegative,
    Patterns,
    PositiveCount,
    check_names,
    check_wide,
    matches_any,
    with_auto_axes_at,
)
from mlax.optim._slots import Slot


@frozen
class GaLore(AdamW):
    """GaLore: AdamW whose moments, for matrices, are those of the gradient projected to `rank` dimensions.

    A matrix is projected along its shorter side onto its gradient's leading singular vectors, which are computed every
    `every` steps; its step is projected back and multiplied by `scale`. Matrices are the leaves of two axes that match
    `matrices`, without patterns those named kernel; other leaves, and matrices no longer than `rank` along one side,
    are updated as by AdamW. Algorithm 2 of https://arxiv.org/abs/2403.03507. `decayed` as in `AdamW`.
    Slots: mean and square, (rank, columns) or (rows, rank) for a matrix; projection, (rows, rank) or (columns, rank).

    >>> optimizer = optim.GaLore(1e-3, rank=2)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean', 'square', 'projection')
    """

    elementwise = False
    rank: PositiveCount = 128  # of the projected gradients
    every: PositiveCount = 200  # updates between two projections
    scale: NonNegative = 0.25  # of the step of a matrix
    matrices: Patterns | None = None  # patterns of the matrices; None: those named kernel

    def __post_init__(self):
        super().__post_init__()
        check_wide(self)

    def patterns(self):
        return (*(self.matrices or ()), *super().patterns())

    def check_paths(self, paths):
        super().check_paths(paths)
        if self.matrices is None:
            check_names(self, "matrices is None", ("kernel",), paths, "pass matrices=, patterns such as '**/weight'")

    def leaf_slots(self, path, w):
        slots = super().leaf_slots(path, w)
        if len(w.shape) != 2 or min(w.shape) <= self.rank or not matches_any(self.matrices, path, ("kernel",)):
            return slots
        shorter = int(w.shape[1] < w.shape[0])
        kept = (None, 1) if shorter == 0 else (0, None)
        moments = {name: slot._replace(axes=kept, sizes=(self.rank,)) for name, slot in slots.items()}
        return {**moments, "projection": Slot((shorter, None), (self.rank,), wide=True)}

    def leaf_update(self, now, g, w, slots):
        if "projection" not in slots:
            return super().leaf_update(now, g, w, slots)
        step, new = with_auto_axes_at(now, self._low_rank_step, g, dict(slots), like=(g, dict(slots)))
        return w - now.rate * now.add_decay(now.scale * step, w), new

    def _low_rank_step(
        self, now: Hyperparams, g: jax.Array, slots: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The step of a matrix before it is scaled, and its new slots."""
        transposed = g.shape[1] < g.shape[0]
        due = now.step % self.every == 0
        projection = lax.cond(
            due, lambda: _leading_vectors(g.T if transposed else g, self.rank), lambda: slots["projection"]
        )
        projected = g @ projection if transposed else projection.T @ g
        moments = adam_moments(now, projected, slots)
        step = adam_direction(now, **moments)
        return step @ projection.T if transposed else projection @ step, {**moments, "projection": projection}


def _leading_vectors(matrix: jax.Array, rank: int) -> jax.Array:
    """The left singular vectors of the `rank` largest singular values, as columns."""
    return jnp.linalg.svd(matrix, full_matrices=False)[0][:, :rank]
