"""A training step: one compiled function from state and batch to new state and metrics."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from mlax._jax import global_norm, leaves_with_paths
from mlax.core import Layer, Tree, short_repr, short_signature, signature
from mlax.optim import Accumulate, Optimizer, hyperparam_ranges, hyperparams_at
from mlax.place import Plan
from mlax.train._aot import CompiledFunction
from mlax.train._evaluation import Evaluation
from mlax.train._loss_scale import LossScale
from mlax.train._metrics import Metrics, pack_metrics
from mlax.train._objective import MASK, Objective, check_non_trainables, gradients, loss_function
from mlax.train._state import TrainState


def step(
    objective: Objective,
    optimizer: Optimizer,
    *,
    many: int = 1,
    accumulate: int = 1,
    scaling: LossScale | None = None,
    guard: bool = True,
    compilations: int = 1,
    plan: Plan | None = None,
) -> "Step":
    """A whole training step as one function: state and batch in, state and metrics out.

    `state, metrics = step(state, batch)` is compiled once, and the state that goes in is donated.

    `objective` has the signature of `fwd`: it takes a batch and gives the loss, or a dict with a 'loss' and more to
    watch, and the new non_trainables. Losses of each example are averaged by `batch["mask"]`, if there is one; a
    scalar is taken as it is, with the rows that only fill up a batch, unless the objective weighs by the mask itself.

    - `many`: steps in one call, by a scan; batches and metrics then have a leading axis of that size.
    - `accumulate`: parts that a batch is taken in, one after another, for the same gradient in less memory.
    - `scaling`: of the loss, for float16: `train.DynamicLossScale()`.
    - `guard`: a step whose loss or gradient is not finite changes nothing but the counts of steps and skipped ones.
    - `plan`: where the state lives and how batches are split; a `place.Plan`. Feeds take `sharding=plan.batches`.
    - `compilations`: how many batch signatures may come, as with `train.Buckets`.

    Clipping, averages of the weights, and accumulation over several batches go around the optimizer (`mlax.optim`).
    """
    return Step(objective, optimizer, many, accumulate, scaling, guard, compilations, plan)


class Step:
    """A compiled training step; see `train.step`."""

    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        many: int = 1,
        accumulate: int = 1,
        scaling: LossScale | None = None,
        guard: bool = True,
        compilations: int = 1,
        plan: Plan | None = None,
    ):
        self.objective = objective
        self.optimizer = optimizer
        self.many = many
        self.accumulate = accumulate
        self.scaling = scaling
        self.guard = guard
        self.plan = plan
        _check(self)
        self.once = CompiledFunction(
            self._called, ("state", "batch"), compilations=compilations, plan=plan, stacked=many > 1
        )
        self._names: tuple[str, ...] = ()  # of the metrics, known once it is traced
        self.evaluation = Evaluation(objective, optimizer, compilations=max(8, compilations), plan=plan)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        if not isinstance(state, TrainState):
            raise TypeError(f"step: the state is a {type(state).__name__}; call step(state, batch).")
        state, numbers = self.once(state, batch)
        return state, Metrics(self._names, numbers)

    def __repr__(self) -> str:
        shown = {"many": 1, "accumulate": 1, "scaling": None, "guard": True, "plan": None}
        options = [f"{name}={getattr(self, name)!r}" for name, usual in shown.items() if getattr(self, name) != usual]
        name = getattr(self.objective, "__qualname__", repr(self.objective))
        return f"train.step({', '.join([name, repr(self.optimizer), *options])})"

    def init(self, rng: jax.Array, trainables: Tree, non_trainables: Tree = None) -> TrainState:
        """The first state, with these variables themselves, where the plan says: the first step donates them."""
        if not jnp.issubdtype(getattr(rng, "dtype", np.bool_), jax.dtypes.prng_key):
            raise TypeError(
                f"step.init: rng is {short_signature(rng)}, but must be a key; write step.init(rng, *variables) with "
                "jax.random.key(0), say, as rng."
            )
        _check_variables(trainables, non_trainables)
        if self.plan is None:
            optimizer = self.optimizer.init(trainables)
        else:
            trainables, non_trainables = self.plan.place((trainables, non_trainables))
            optimizer = self.plan.init_slots(self.optimizer, trainables)

        def own(leaf: jax.Array) -> jax.Array:
            """A copy on the weights' own devices: all of the state is donated."""
            return jnp.zeros_like(optimizer.step, leaf.dtype) + leaf

        key = random.wrap_key_data(own(random.key_data(rng)), impl=str(random.key_impl(rng)))
        scaling = None if self.scaling is None else jax.tree.map(own, self.scaling.init())
        zero = jnp.zeros_like(optimizer.step)
        return TrainState(zero, trainables, non_trainables, optimizer, key, scaling, jnp.copy(zero))

    def advance(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """The step as a pure function, not compiled."""
        rng = random.fold_in(state.rng, state.step)
        scale = None if self.scaling is None else state.scaling["scale"]
        stages = _in_turns(self)
        values, grads, non_trainables = gradients(
            self.objective,
            batch,
            state.trainables,
            state.non_trainables,
            rng,
            accumulate=self.accumulate if stages is None else stages.microbatches,
            scale=scale,
            backward=None if stages is None else stages.backward,
        )
        check_non_trainables(state.non_trainables, non_trainables)
        norm = global_norm(dict(leaves_with_paths(grads)))
        fine = jnp.isfinite(norm) & jnp.isfinite(values["loss"]) if self.guard else None
        trainables, optimizer = self.optimizer.update(
            grads,
            state.optimizer,
            state.trainables,
            value=values["loss"],
            loss=loss_function(self.objective, batch, state.non_trainables, rng, accumulate=self.accumulate),
            take=fine,
        )
        new = TrainState(state.step, trainables, non_trainables, optimizer, state.rng, state.scaling, state.skipped)
        metrics = {**values, "gradient_norm": norm}
        if (current := learning_rate(self.optimizer, state.optimizer.step)) is not None:
            metrics["rate"] = current
        if fine is not None:
            kept = jax.tree.map(lambda new, old: jnp.where(fine, new, old), non_trainables, state.non_trainables)
            new = new._replace(non_trainables=kept, skipped=state.skipped + (~fine).astype(jnp.int32))
            metrics["skipped"] = ~fine
            if self.scaling is not None:
                new = new._replace(scaling=self.scaling.after(state.scaling, fine))
                metrics["scale"] = state.scaling["scale"]
        return new._replace(step=state.step + 1), metrics

    def _called(self, state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        """What is compiled: one step, or many of them, and their metrics in one array."""
        if self.many == 1:
            state, metrics = self.advance(state, batch)
        else:
            _check_stacked(self.many, batch)
            state, metrics = lax.scan(self.advance, state, batch, length=self.many)
        self._names = tuple(metrics)
        return state, pack_metrics(metrics)


def _in_turns(step: Step) -> Any:
    """The stages of the plan, if they take their turns at forward and backward passes by themselves."""
    stages = None if step.plan is None else step.plan.stages
    return stages if stages is not None and stages.backward is not None else None


def _check(step: Step) -> None:
    if isinstance(step.objective, Layer) or not callable(step.objective):
        raise TypeError(
            f"train.step: the objective is {short_repr(step.objective)}, but must be a function like `fwd`."
        )
    if not isinstance(step.optimizer, Optimizer):
        raise TypeError(
            f"train.step: {step.optimizer!r} is no optimizer of mlax; wrap one of Optax by optim.from_optax."
        )
    for name in ("many", "accumulate"):
        if not isinstance(getattr(step, name), int) or getattr(step, name) < 1:
            raise ValueError(f"train.step: {name} is {getattr(step, name)!r}, but must be an int of at least 1.")
    if step.scaling is not None and not isinstance(step.scaling, LossScale):
        raise TypeError(f"train.step: scaling is {step.scaling!r}; pass train.DynamicLossScale() or StaticLossScale().")
    if step.plan is not None and not isinstance(step.plan, Plan):
        raise TypeError(f"train.step: plan is {step.plan!r}, but must be a place.Plan; write place.fsdp(), say.")
    if step.accumulate > 1 and _in_turns(step) is not None:
        raise ValueError("train.step: the plan's pipeline takes batches in parts already; leave accumulate at 1.")
    if step.scaling is not None and not step.guard:
        raise ValueError("train.step: a scaled loss overflows now and then, so guard must stay True.")


def _check_variables(trainables: Tree, non_trainables: Tree) -> None:
    if not isinstance(trainables, dict):
        raise TypeError(
            f"step.init: trainables is {signature(trainables)}, but must be a dict of arrays; pass the pair that init "
            "gave as two arguments: step.init(rng, *model.init(...))."
        )
    seen: dict[int, str] = {}
    for path, leaf in leaves_with_paths({"trainables": trainables, "non_trainables": non_trainables}):
        if id(leaf) in seen:
            raise ValueError(
                f"step.init: {path} and {seen[id(leaf)]} are one array, which cannot be donated twice; store tied "
                "weights once (mlax.Tied), or copy one of them."
            )
        seen[id(leaf)] = path


def _check_stacked(many: int, batches: Any) -> None:
    mask = batches.get(MASK) if isinstance(batches, dict) else None
    for path, leaf in leaves_with_paths(batches):
        if leaf.ndim == 0 or leaf.shape[0] != many or (mask is not None and mask.ndim < 2):
            raise ValueError(
                f"step: many is {many}, so each array holds {many} batches on a leading axis, but {path} is "
                f"{signature(leaf)}; take them from feed.stream(stacked={many})."
            )


def learning_rate(optimizer: Optimizer, step: jax.Array) -> jax.Array | None:
    """That of the outermost optimizer which has one, at one of its own steps; None if none has."""
    if "rate" in hyperparam_ranges(type(optimizer)):
        return jnp.asarray(hyperparams_at(optimizer, step, {})["rate"], jnp.float32)
    if isinstance(optimizer, Accumulate):
        step = step // optimizer.every
    found: list[Any] = [learning_rate(inner, step) for inner in optimizer.within()]
    return next((each for each in found if each is not None), None)
