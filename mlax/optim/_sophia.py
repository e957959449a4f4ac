"""SophiaG: a momentum over the curvature, each step clipped."""

from typing import Any

import jax
import jax.numpy as jnp

from mlax.core import Tree, frozen
from mlax.optim._base import Leafwise
from mlax.optim._hyperparams import Beta, NonNegative, Patterns, Rate, hyperparams_at
from mlax.optim._slot_layout import slot_layout
from mlax.optim._slots import OptimizerState, Slot
from mlax.optim._trees import cast_like, flatten_trainables, moving_average


@frozen
class SophiaG(Leafwise):
    """`w - rate * clip(mean / max(gamma * curvature, eps), -1, 1)`, with decay as in `AdamW`.

    Call `estimate` every ten steps or so: the curvature is an average over these calls. Slots: mean, curvature.
    Algorithm 3, and 2 for the estimate, of https://arxiv.org/abs/2305.14342
    """

    elementwise = True
    rate: Rate
    b1: Beta = 0.96
    b2: Beta = 0.99
    gamma: NonNegative = 0.01
    eps: NonNegative = 1e-12
    decay: NonNegative = 0.1
    decayed: Patterns | None = None

    def keeps(self, path, w):
        return {"mean": Slot(), "curvature": Slot(wide=True)}

    def step(self, now, g, w, slots):
        mean = moving_average(slots["mean"], g, now.b1)
        step = jnp.clip(mean / jnp.maximum(now.gamma * slots["curvature"], now.eps), -1.0, 1.0)
        return w - now.rate * now.decayed(step, w), {"mean": mean, "curvature": slots["curvature"]}

    def estimate(self, sampled: Tree, state: OptimizerState, batch: Any) -> OptimizerState:
        """The state with a new estimate of the curvature.

        `sampled` are gradients of the mean loss over `batch` examples whose labels were drawn from the model's own
        prediction: `jax.random.categorical(rng, logits)`.
        """
        leaves = flatten_trainables(self, sampled)
        layout, values = slot_layout(self, leaves), hyperparams_at(self, state.step, {})
        old = leaves.same(state.curvature, "curvature")
        new: dict[str, jax.Array] = {}
        for path, g in leaves.by_path.items():
            g, h = layout.widened(path, g), layout.widened(path, old[path])
            b2 = values["b2"] if isinstance(values["b2"], float) else values["b2"].astype(g.dtype)
            new[path] = cast_like(moving_average(h, g * g * jnp.asarray(batch, g.dtype), b2), old[path])
        return state._replace(curvature=leaves.tree(new))
