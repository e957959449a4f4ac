"""Evaluation: the means of an objective's values, and its metrics, over a feed."""

import collections
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mlax._metric import MetricSums, compute_metrics, scalar_metrics
from mlax._objective import Objective, batch_weight, call_objective, check_signature, reduce_values
from mlax.core import Documented, check_not_donated, function_name
from mlax.optim import Optimizer
from mlax.place import Plan
from mlax.train._aot import CompiledFunction
from mlax.train._metrics import Metrics
from mlax.train._state import DONATED_STATE, TrainState

EVALUATION_KEYS = 2**32 - 1  # folded into the key first; no training step has this number
MAX_IN_FLIGHT = 4  # batches
WEIGHT = ""  # the name of the batch's weight beside the sums

BatchSums = tuple[Metrics, dict[str, MetricSums]]


class Evaluation(metaclass=Documented):
    """Computes the means of an objective's values over batches, weighted by their masks, with `inference_mode=True`.

    `evaluation(state, feed)` returns floats by name, over one epoch of a feed or over any iterable of batches. A
    `train.Metric` is computed from its sums over all of them; one that is not a scalar, such as a confusion matrix, is
    a NumPy array. It uses the weights that the optimizer provides for evaluation, their average, if it keeps one, and
    non_trainables averaged likewise. A random objective gets the same keys in each evaluation. Sums are accumulated on
    the host in float64.
    """

    def __init__(self, objective: Objective, optimizer: Optimizer, *, compilations: int = 8, plan: Plan | None = None):
        self.objective = objective
        self.optimizer = optimizer
        self.plan = plan
        names = ("state", "index", "batch")
        self.aot = CompiledFunction(
            self._sums,
            names,
            donate=False,
            compilations=compilations,
            plan=plan,
            owner="evaluation",
            objective=objective,
        )

    def __repr__(self) -> str:
        return f"Evaluation({function_name(self.objective)}, {self.optimizer!r})"

    def __call__(self, state: TrainState, batches: Any) -> dict[str, Any]:
        if not isinstance(state, TrainState):
            raise TypeError(f"evaluation: the state is a {type(state).__name__}; call evaluation(state, feed).")
        check_not_donated("evaluation", DONATED_STATE, state=state)
        if hasattr(batches, "epoch"):
            with batches.epoch() as stream:
                return self._scores(state, stream)
        if isinstance(batches, dict) or not isinstance(batches, Iterable):
            raise TypeError(
                f"evaluation: a {type(batches).__name__} is not a feed; pass a feed, or an iterable of batches."
            )
        return self._scores(state, batches)

    def prepare(self, state: TrainState, feed: Any) -> tuple[str, ...]:
        """Compile for the first batch of a feed, so that errors show early; returns the names of the scalars."""
        names: tuple[str, ...] = ()
        with feed.stream(0, 1) as batches:
            for batch in batches:
                traced, _ = self.aot.stages(state, np.int32(0), batch)
                sums, metrics = traced.out_info
                scalars = jax.eval_shape(scalar_metrics, metrics)
                names = (*(name for name in sums.names if name != WEIGHT), *scalars)
        return names

    def _scores(self, state: TrainState, batches: Iterable[Any]) -> dict[str, Any]:
        pending: collections.deque[BatchSums] = collections.deque()
        totals: dict[str, Any] = {}
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
        with np.errstate(divide="ignore", invalid="ignore"):  # a metric may be NaN
            scores = compute_metrics(
                {name: total if isinstance(total, MetricSums) else total / weight for name, total in totals.items()}
            )
        return {name: np.asarray(value) if np.ndim(value) else float(value) for name, value in scores.items()}

    def _sums(self, state: TrainState, index: jax.Array, batch: Any) -> BatchSums:
        """The sum of each value over the batch with the weight of the batch, and the sums of each metric."""
        variables = state.eval_variables(self.optimizer)
        rng = random.fold_in(random.fold_in(state.rng, EVALUATION_KEYS), index)
        check_signature("evaluation", self.objective, rng=rng, inference_mode=True)
        values, _ = call_objective(self.objective, batch, *variables, rng=rng, inference_mode=True)
        total = batch_weight(batch)
        weight = jnp.float32(_batch_size(batch)) if total is None else total
        reduced = reduce_values(values, batch, total)
        metrics = {name: value for name, value in reduced.items() if isinstance(value, MetricSums)}
        sums = {name: mean * weight.astype(mean.dtype) for name, mean in reduced.items() if name not in metrics}
        if self.plan is not None:  # so that each process can read them
            metrics = lax.with_sharding_constraint(metrics, NamedSharding(self.plan.mesh, P()))
        return Metrics.pack({**sums, WEIGHT: weight}), metrics


def _add(totals: dict[str, Any], sums: BatchSums) -> None:
    packed, metrics = sums
    for name, array in {**packed.to_numpy(), **metrics}.items():  # in the order of the objective's values
        value = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), array)
        totals[name] = totals[name] + value if name in totals else value


def _batch_size(batch: Any) -> int:
    return next((len(leaf) for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)), 1)
