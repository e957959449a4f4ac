"""Accumulate: one step of an optimizer for several gradients."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlax.core import DType, frozen
from mlax.optim._around import Around
from mlax.optim._optimizer import Advanced
from mlax.optim._slot import Slot


@frozen
class Accumulate(Around):
    """The optimizer takes a step with the mean of `every` gradients, and in between nothing moves.

    Slot: gathered, their sum, in `dtype`. The steps that schedules inside see are those that are taken.
    """

    elementwise = True
    every: int = 1
    dtype: DType = None  # None: that of the weights, or float32 if that is narrower

    def __post_init__(self):
        super().__post_init__()
        if self.every < 1:
            raise ValueError(f"Accumulate: every is {self.every}, but must be at least 1.")

    def adds(self, path, w):
        return {"gathered": Slot(dtype=self.dtype, wide=True)}

    def shows(self, path, w, slots, step):
        return self.optimizer.shows(path, w, slots, step // self.every)

    def advance(self, now, grads, weights, slots):
        gathered = {path: slots["gathered"][path] + g for path, g in grads.items()}
        inner = {name: slot for name, slot in slots.items() if name != "gathered"}
        moment = dataclasses.replace(now, step=now.step // self.every)
        if now.in_pieces:
            moment = dataclasses.replace(moment, total=_refuse)

        def taken(_: Any) -> tuple[Any, Any, Any]:
            means = {path: g * (1 / self.every) for path, g in gathered.items()}
            new, after = self.optimizer.advance(moment, means, weights, {**inner, "step": moment.step + 1})
            after = {
                name: {**inner[name], **after[name]} if isinstance(inner[name], dict) else after[name] for name in inner
            }
            return {**weights, **new}, {**after, "step": slots["step"]}, jax.tree.map(jnp.zeros_like, gathered)

        def waited(_: Any) -> tuple[Any, Any, Any]:
            return dict(weights), inner, gathered

        new, after, gathered = lax.cond(now.step % self.every == self.every - 1, taken, waited, None)
        return Advanced(new, {**after, "gathered": gathered})


def _refuse(amount: jax.Array) -> jax.Array:
    raise ValueError(
        "Accumulate: an optimizer inside adds up over all leaves (ClipGlobalNorm, say), which cannot wait for a "
        "condition while leaves are in host memory; put it around Accumulate, or take train.step(accumulate=...)."
    )
