"""Evaluation: the means of an objective's values over a feed."""

import collections
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from mlax._objective import Objective, batch_weight, mean_contribution, unpack_output
from mlax.core import check_not_donated
from mlax.optim import Optimizer
from mlax.place import Plan
from mlax.train._aot import CompiledFunction
from mlax.train._metrics import Metrics
from mlax.train._state import DONATED_STATE, TrainState

EVALUATION_KEYS = 2**32 - 1  # folded into the key first; no training step has this number
MAX_IN_FLIGHT = 4  # batches
WEIGHT = ""  # the name of the batch's weight beside the sums


class Evaluation:
    """Computes the means of an objective's values over batches, weighted by their masks, with `inference_mode=True`.

    `evaluation(state, feed)` returns floats by name, over one epoch of a feed or over any iterable of batches. It uses
    the weights that the optimizer provides for evaluation, their average, if it keeps one, and non_trainables averaged
    likewise. A random objective gets the same keys in each evaluation. Sums are accumulated on the host in float64.
    """

    def __init__(self, objective: Objective, optimizer: Optimizer, *, compilations: int = 8, plan: Plan | None = None):
        self.objective = objective
        self.optimizer = optimizer
        names = ("state", "index", "batch")
        self.aot = CompiledFunction(
            self._sums, names, donate=False, compilations=compilations, plan=plan, owner="evaluation"
        )

    def __call__(self, state: TrainState, batches: Any) -> dict[str, float]:
        if not isinstance(state, TrainState):
            raise TypeError(f"evaluation: the state is a {type(state).__name__}; call evaluation(state, feed).")
        check_not_donated("evaluation", DONATED_STATE, state=state)
        if hasattr(batches, "epoch"):
            with batches.epoch() as stream:
                return self._means(state, stream)
        if isinstance(batches, dict) or not isinstance(batches, Iterable):
            raise TypeError(
                f"evaluation: a {type(batches).__name__} is not a feed; pass a feed, or an iterable of batches."
            )
        return self._means(state, batches)

    def prepare(self, state: TrainState, feed: Any) -> tuple[str, ...]:
        """Compile for the first batch of a feed, so that errors show early; returns the names of the values."""
        names: tuple[str, ...] = ()
        with feed.stream(0, 1) as batches:
            for batch in batches:
                traced, _ = self.aot.stages(state, np.int32(0), batch)
                names = tuple(name for name in traced.out_info.names if name != WEIGHT)
        return names

    def _means(self, state: TrainState, batches: Iterable[Any]) -> dict[str, float]:
        pending: collections.deque[Metrics] = collections.deque()
        totals: dict[str, float] = {}
        for index, batch in enumerate(batches):
            pending.append(self.aot(state, np.int32(index), batch))
            if len(pending) > MAX_IN_FLIGHT:
                _add(totals, pending.popleft())
        for sums in pending:
            _add(totals, sums)
        weight = totals.pop(WEIGHT, 0.0)
        if totals and not weight > 0:
            raise ValueError(
                f"evaluation: the masks of the batches sum to {weight:g}, so that there is no example to evaluate; "
                "batch['mask'] is 1 for an example and 0 for padding."
            )
        return {name: total / weight for name, total in totals.items()}

    def _sums(self, state: TrainState, index: jax.Array, batch: Any) -> Metrics:
        """The sum of each value over the batch, and the weight of the batch."""
        variables = state.eval_variables(self.optimizer)
        rng = random.fold_in(random.fold_in(state.rng, EVALUATION_KEYS), index)
        output = self.objective(batch, *variables, rng=rng, inference_mode=True)
        values, _ = unpack_output(output)
        total = batch_weight(batch)
        weight = jnp.float32(_batch_size(batch)) if total is None else total
        means = {name: mean_contribution(name, value, batch, total) for name, value in values.items()}
        sums = {name: mean * weight.astype(mean.dtype) for name, mean in means.items()}
        return Metrics.pack({**sums, WEIGHT: weight})


def _add(totals: dict[str, float], sums: Metrics) -> None:
    for name, value in sums.to_numpy().items():
        totals[name] = totals.get(name, 0.0) + float(value)


def _batch_size(batch: Any) -> int:
    return next((len(leaf) for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)), 1)
