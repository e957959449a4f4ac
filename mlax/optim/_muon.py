"""Muon: orthogonalised momentum for matrices, another optimizer for the rest."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from mlax._jax import with_auto_axes
from mlax.core import DType, frozen
from mlax.optim._adam import AdamW
from mlax.optim._base import Optimizer, StepResult, check_wrappable, subset
from mlax.optim._hyperparams import Beta, Count, NonNegative, Patterns, Rate, check_names, matches_any
from mlax.optim._leafwise import Leafwise
from mlax.optim._slots import Slot
from mlax.optim._trees import moving_average, norm

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of https://kellerjordan.github.io/posts/muon


@frozen
class Muon(Leafwise):
    """Muon: `w - rate * (sqrt(max(1, outputs / inputs)) * orthogonalise(mean) + decay * w)` for matrices; `rest` for
    others.

    Matrices are the leaves that match `matrices`; without patterns, those named kernel. Each layer of a stack, of
    `Repeat` or of experts say, is a separate matrix. A leaf of more axes that `matrices` names, a convolution's say,
    is a matrix of its first axis against the others; one that it does not name is an error. An override of a name that
    `rest` has too is Muon's. `newton_dtype` is the dtype of the matrix products.
    https://kellerjordan.github.io/posts/muon, with the weight decay of https://arxiv.org/abs/2502.16982. Slots: mean,
    and those of `rest` for the other leaves.

    >>> optimizer = optim.Muon(0.02)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'mean')
    """

    shadows_overrides = True
    rate: Rate = 0.02  # the learning rate, a number or a schedule
    momentum: Beta = 0.95  # the decay rate of the mean of gradients
    nesterov: bool = True  # whether the gradient looks one step ahead
    steps: Count = 5  # of the Newton-Schulz iteration
    decay: NonNegative = 0.1  # the weight decay
    matrices: Patterns | None = None  # patterns of the matrices; None: those named kernel
    rest: Optimizer = AdamW(3e-4)  # the optimizer of all other leaves
    newton_dtype: DType = None  # None: the compute dtype

    def __post_init__(self):
        super().__post_init__()
        check_wrappable(self, self.rest)

    def inner_optimizers(self):
        return (self.rest,)

    def is_chunkable(self, path):
        return super().is_chunkable(path) if self._is_matrix(path) else self.rest.is_chunkable(path)

    def patterns(self):
        return (*self.stacked, *(self.matrices or ()), *self.rest.patterns())

    def check_paths(self, paths):  # not those of `rest`, which may get no leaf, or none that decays
        if self.matrices is None:
            check_names(self, "matrices is None", ("kernel",), paths, "pass matrices=, patterns such as '**/weight'")

    def policy(self, path):
        return super().policy(path) if self._is_matrix(path) else self.rest.policy(path)

    def is_frozen(self, path):
        return not self._is_matrix(path) and self.rest.is_frozen(path)

    def estimate_leaf(self, step, path, g, slots, examples):
        return {} if self._is_matrix(path) else self.rest.estimate_leaf(step, path, g, slots, examples)

    def slots(self, path, w):
        return super().slots(path, w) if self._is_matrix(path) else self.rest.slots(path, w)

    def eval_weights(self, path, w, slots, step):
        return w if self._is_matrix(path) else self.rest.eval_weights(path, w, slots, step)

    def scalars(self):
        return self.rest.scalars()

    def leaf_slots(self, path, w):
        layer = " in each layer" if self._layer_axes(path) else ""
        if len(w.shape) < 2:
            raise ValueError(
                f"Muon: {path!r} has shape {w.shape}{layer}, which is not a matrix; name matrices by `matrices`."
            )
        if len(w.shape) > 2 and self.matrices is None:
            by_hand = "" if layer else f"stacked=({path!r},) to take it as matrices along its first axis, "
            raise ValueError(
                f"Muon: {path!r} has shape {w.shape}{layer}, which may be a convolution's or a stack of matrices; "
                'write matrices=("**/kernel",) to take it as one matrix of its first axis against the others, '
                f"{by_hand}or other patterns for `matrices`, which leave it to `rest`."
            )
        return {"mean": Slot()}

    def update_leaves(self, context, grads, weights, slots):
        matrices = [path for path in grads if self._is_matrix(path)]
        others = [path for path in grads if path not in matrices]
        new, new_slots = super().update_leaves(context, subset(grads, matrices), subset(weights, matrices), slots)
        context = dataclasses.replace(context.without_overrides(self), shared_step=True)
        rest, rest_slots = self.rest.update_leaves(context, subset(grads, others), subset(weights, others), slots)
        merged = {
            name: {**new_slots.get(name, {}), **leaves} if isinstance(leaves, dict) else leaves
            for name, leaves in rest_slots.items()
        }
        return StepResult({**new, **rest}, {**new_slots, **merged})

    def shared_values(self, now, scalars):
        return dict(scalars)

    def leaf_update(self, now, g, w, slots):
        mean = moving_average(slots["mean"], g, now.momentum)
        step = moving_average(g, mean, 1 - now.momentum) if self.nesterov else mean
        outputs, inputs = (g.shape[1], g.shape[0]) if g.ndim == 2 else (g.shape[0], math.prod(g.shape[1:]))
        step = with_auto_axes(self._orthogonalise, step, like=step) * math.sqrt(max(1.0, outputs / max(1, inputs)))
        return w - now.rate * now.add_decay(step, w), {"mean": mean}

    def _orthogonalise(self, x: jax.Array) -> jax.Array:
        """About `u v` where `x = u s v`: Newton-Schulz iterations bring every singular value near 1."""
        a, b, c = COEFFICIENTS
        matrix = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        # a constant added to the norm, as in the authors' code, would distort the step for small gradients
        size = jnp.maximum(norm(matrix), float(jnp.finfo(x.dtype).tiny))
        matrix = (matrix / size).astype(self.newton_dtype or x.dtype)
        tall = matrix.shape[0] > matrix.shape[1]
        matrix = matrix.T if tall else matrix
        for _ in range(self.steps):
            square = matrix @ matrix.T
            matrix = a * matrix + (b * square + c * square @ square) @ matrix
        return (matrix.T if tall else matrix).astype(x.dtype).reshape(x.shape)

    def _is_matrix(self, path: str) -> bool:
        return matches_any(self.matrices, path, ("kernel",))
