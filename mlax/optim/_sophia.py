"""SophiaG: momentum over an estimate of the curvature, with clipped steps."""

from typing import Any

import jax
import jax.numpy as jnp

from mlax.core import Tree, frozen
from mlax.optim._base import Leafwise
from mlax.optim._hyperparams import Beta, NonNegative, Patterns, Positive, Rate, hyperparams_at
from mlax.optim._slot_layout import slot_layout
from mlax.optim._slots import OptimizerState, Slot
from mlax.optim._trees import cast_like, flatten_trainables, moving_average


@frozen
class SophiaG(Leafwise):
    """`w - rate * clip(mean / max(gamma * curvature, eps), -1, 1)`, with weight decay as in `AdamW`.

    The curvature is a moving average over calls of `estimate`, one every ten steps or so. Algorithm 3, and 2 for the
    estimate, of https://arxiv.org/abs/2305.14342. Slots: mean, curvature.
    """

    elementwise = True
    rate: Rate
    b1: Beta = 0.96
    b2: Beta = 0.99
    gamma: NonNegative = 0.01
    eps: Positive = 1e-12
    decay: NonNegative = 0.1
    decayed: Patterns | None = None

    def leaf_slots(self, path, w):
        return {"mean": Slot(), "curvature": Slot(wide=True)}

    def leaf_update(self, now, g, w, slots):
        mean = moving_average(slots["mean"], g, now.b1)
        step = jnp.clip(mean / jnp.maximum(now.gamma * slots["curvature"], now.eps), -1.0, 1.0)
        return w - now.rate * now.add_decay(step, w), {"mean": mean, "curvature": slots["curvature"]}

    def estimate(self, sampled: Tree, state: OptimizerState, batch: Any) -> OptimizerState:
        """The state with an updated curvature.

        `sampled` are gradients of the mean loss over `batch` examples, with labels sampled from the predictions of the
        model: `jax.random.categorical(rng, logits)`.
        """
        tree = flatten_trainables(self, sampled)
        layout, values = slot_layout(self, tree), hyperparams_at(self, state.step, {})
        old = tree.flatten_like(state.curvature, "curvature")
        new: dict[str, jax.Array] = {}
        for path, leaf in tree.by_path.items():
            g, h = layout.leaves[path].upcast(leaf), layout.leaves[path].upcast(old[path])
            b2 = values["b2"] if isinstance(values["b2"], float) else values["b2"].astype(g.dtype)
            new[path] = cast_like(moving_average(h, g * g * jnp.asarray(batch, g.dtype), b2), old[path])
        return state._replace(curvature=tree.unflatten(new))
