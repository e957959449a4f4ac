"""Muon: a momentum made orthogonal, for matrices; another optimizer for the rest."""

import math

import jax

from mlax._jax import with_auto_axes
from mlax.core import DType, frozen
from mlax.optim._adam import AdamW
from mlax.optim._base import Leafwise, Optimizer, StepResult, check_wrappable, matches_any, subset
from mlax.optim._hyperparams import Beta, NonNegative, Patterns, Rate
from mlax.optim._slots import Slot
from mlax.optim._trees import moving_average, norm

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of https://kellerjordan.github.io/posts/muon


@frozen
class Muon(Leafwise):
    """`w - rate * (sqrt(max(1, outputs / inputs)) * orthogonal(mean) + decay * w)` for matrices; `rest` for the others.

    Matrices are the leaves that match a pattern of `matrices`; without patterns, those named kernel. One of more than
    two axes, a convolution's, is taken as its first axis against the others, unless it is `stacked`. `newton_dtype` is
    the dtype of the products that make the mean orthogonal. Slots: mean, and what `rest` keeps beside the others.
    https://kellerjordan.github.io/posts/muon, with the decay of https://arxiv.org/abs/2502.16982
    """

    rate: Rate = 0.02
    momentum: Beta = 0.95
    nesterov: bool = True
    steps: int = 5
    decay: NonNegative = 0.1
    matrices: Patterns | None = None
    rest: Optimizer = AdamW(3e-4)
    newton_dtype: DType = None  # None: that of the arithmetic

    def __post_init__(self):
        super().__post_init__()
        check_wrappable(self, self.rest)

    def patterns(self):
        return (*self.stacked, *(self.matrices or ()), *self.rest.patterns())

    def policy(self, path):
        return super().policy(path) if self._is_matrix(path) else self.rest.policy(path)

    def slots(self, path, w):
        return super().slots(path, w) if self._is_matrix(path) else self.rest.slots(path, w)

    def shows(self, path, w, slots, step):
        return w if self._is_matrix(path) else self.rest.shows(path, w, slots, step)

    def scalars(self):
        return self.rest.scalars()

    def keeps(self, path, w):
        if len(w.shape) < 2:
            raise ValueError(f"Muon: {path!r} has the shape {w.shape}, which is no matrix; name those by `matrices`.")
        return {"mean": Slot()}

    def advance(self, now, grads, weights, slots):
        mine = [path for path in grads if self._is_matrix(path)]
        others = [path for path in grads if path not in mine]
        new, after = super().advance(now, subset(grads, mine), subset(weights, mine), slots)
        rest, kept = self.rest.advance(now.without(self), subset(grads, others), subset(weights, others), slots)
        merged = {
            name: {**after.get(name, {}), **leaves} if isinstance(leaves, dict) else leaves
            for name, leaves in kept.items()
        }
        return StepResult({**new, **rest}, {**after, **merged})

    def shared(self, now, scalars):
        return dict(scalars)

    def step(self, now, g, w, slots):
        mean = moving_average(slots["mean"], g, now.momentum)
        step = moving_average(g, mean, 1 - now.momentum) if self.nesterov else mean
        outputs, inputs = (g.shape[1], g.shape[0]) if g.ndim == 2 else (g.shape[0], math.prod(g.shape[1:]))
        step = with_auto_axes(self._orthogonal, step, like=step) * math.sqrt(max(1.0, outputs / max(1, inputs)))
        return w - now.rate * now.decayed(step, w), {"mean": mean}

    def _orthogonal(self, x: jax.Array) -> jax.Array:
        """About `u v` where `x = u s v`: each singular value is brought near 1, by a polynomial of the matrix."""
        a, b, c = COEFFICIENTS
        matrix = x.reshape(x.shape[0], -1)
        matrix = (matrix / (norm(matrix) + 1e-7)).astype(self.newton_dtype or x.dtype)
        tall = matrix.shape[0] > matrix.shape[1]
        matrix = matrix.T if tall else matrix
        for _ in range(self.steps):
            square = matrix @ matrix.T
            matrix = a * matrix + (b * square + c * square @ square) @ matrix
        return (matrix.T if tall else matrix).astype(x.dtype).reshape(x.shape)

    def _is_matrix(self, path: str) -> bool:
        return matches_any(self.matrices, path, ("kernel",))
