"""Evaluation: the means of an objective's values over a whole feed."""

import collections
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from mlax.optim import Optimizer
from mlax.place import Plan
from mlax.train._aot import CompiledFunction
from mlax.train._metrics import pack_metrics
from mlax.train._objective import Objective, batch_weight, check_output, weighted_mean
from mlax.train._state import TrainState

EVALUATION_KEYS = 2**32 - 1  # folded into the key first: no training step has this number
MAX_IN_FLIGHT = 4  # batches that may be under way


class Evaluation:
    """The means of the values over batches, each example weighing what its mask says, at inference.

    `evaluation(state, feed)` gives floats by name over one epoch of the feed, or over any batches. The weights are
    those that the optimizer says to evaluate with: their average, if it keeps one. A random objective gets the same
    keys at each evaluation. The sums are taken on the host in float64.
    """

    def __init__(self, objective: Objective, optimizer: Optimizer, *, compilations: int = 8, plan: Plan | None = None):
        self.objective = objective
        self.optimizer = optimizer
        names = ("state", "index", "batch")
        self.once = CompiledFunction(self._called, names, donate=False, compilations=compilations, plan=plan)
        self.names: tuple[str, ...] = ()  # of the values, known once it is traced

    def __call__(self, state: TrainState, batches: Any) -> dict[str, float]:
        if not isinstance(state, TrainState):
            raise TypeError(f"evaluation: the state is a {type(state).__name__}; call evaluation(state, feed).")
        if hasattr(batches, "epoch"):
            with batches.epoch() as stream:
                return self._over(state, stream)
        if isinstance(batches, dict) or not isinstance(batches, Iterable):
            raise TypeError(f"evaluation: a {type(batches).__name__} is no feed; pass one, or an iterable of batches.")
        return self._over(state, batches)

    def prepare(self, state: TrainState, feed: Any) -> None:
        """Compile for the first batch of a feed: a mistake shows before training, and not after an epoch of it."""
        with feed.stream(0, 1) as batches:
            for batch in batches:
                self.once.compile(state, np.int32(0), batch)

    def _over(self, state: TrainState, batches: Iterable[Any]) -> dict[str, float]:
        pending: collections.deque[jax.Array] = collections.deque()
        total: Any = 0.0
        for index, batch in enumerate(batches):
            pending.append(self.once(state, np.int32(index), batch))
            if len(pending) > MAX_IN_FLIGHT:
                total = total + np.asarray(pending.popleft(), np.float64)
        total = total + sum(np.asarray(sums, np.float64) for sums in pending)
        if np.ndim(total) == 0:
            return {}
        *sums, counted = total
        return {name: float(value / counted) if counted else 0.0 for name, value in zip(self.names, sums, strict=True)}

    def _called(self, state: TrainState, index: jax.Array, batch: Any) -> jax.Array:
        """The sum of each value over the batch, and last what the batch weighs."""
        trainables = self.optimizer.averaged(state.optimizer, state.trainables)
        rng = random.fold_in(random.fold_in(state.rng, EVALUATION_KEYS), index)
        returned = self.objective(batch, trainables, state.non_trainables, rng=rng, inference_mode=True)
        values, _ = check_output(returned)
        self.names = tuple(values)
        total = batch_weight(batch)
        counted = jnp.float32(_examples(batch)) if total is None else total
        sums = {name: weighted_mean(name, value, batch, total) for name, value in values.items()}
        return pack_metrics(
            {**{name: value * counted.astype(value.dtype) for name, value in sums.items()}, "": counted}
        )


def _examples(batch: Any) -> int:
    return next((len(leaf) for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)), 1)
