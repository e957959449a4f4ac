"""A training step: one compiled function from state and batch to new state and metrics."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mlax._garbage import pause_garbage_collection
from mlax._jax import all_stay_finite, global_norm, leaves_with_paths, named_key
from mlax._metric import scalar_metrics
from mlax._objective import (
    Backward,
    Gradients,
    Objective,
    check_non_trainables,
    count_labels,
    gradients,
    loss_function,
)
from mlax.core import (
    Documented,
    Layer,
    NoMatch,
    Tree,
    as_patterns,
    check_not_donated,
    match_paths,
    shape_dtypes,
    short_repr,
    variable_shapes,
)
from mlax.inspect import NonFinite, nonfinite
from mlax.optim import Optimizer, OptimizerState, UpdateContext, train_only
from mlax.place import Plan
from mlax.train._aot import CompiledFunction, is_small
from mlax.train._evaluation import Evaluation
from mlax.train._loss_scale import LossScale
from mlax.train._metrics import Metrics
from mlax.train._privacy import DifferentialPrivacy
from mlax.train._state import DONATED_STATE, TrainState, init_state
from mlax.train._step_checks import check_options, check_stacked, pipeline_with_backward

UNROLL = 4  # small steps on a GPU, so that a graph of kernels is launched for several of them


def step(
    objective: Objective,
    optimizer: Optimizer,
    *,
    train: str | tuple[str, ...] | None = None,
    steps_per_call: int = 1,
    accumulate: int = 1,
    scaling: LossScale | None = None,
    skip_nonfinite: bool = True,
    compilations: int = 1,
    plan: Plan | None = None,
    privacy: DifferentialPrivacy | None = None,
    sampled: Objective | None = None,
) -> "Step":
    """A training step: forward pass, backward pass and update as one function, compiled once, which donates the state
    passed in.

    It is called as `state, metrics = step(state, batch)`.

    `objective` has the signature of `fwd`: it takes a batch, and returns the loss, or a dict with a 'loss' and other
    values to log, and the new non_trainables. A loss per example is averaged with the weights `batch["mask"]`, if there
    are any. A scalar is used as it is, so an objective that returns one must itself leave out the padding of a batch.
    A `train.Metric`, such as `train.F1`, is computed from sums over the batch.

    - `train`: for fine-tuning, patterns of the leaves that are trained, such as "**/lora/*", or "!embed/**" for all but
      these. The others are frozen: they cost no backward pass, no gradients and no optimizer slots.
    - `steps_per_call`: steps that one call runs, by a scan; if several, batches and metrics have a leading axis of that
      size.
    - `accumulate`: microbatches that a batch is split into: the same gradient in less memory.
    - `scaling`: loss scaling for float16, such as `train.DynamicLossScale()`.
    - `skip_nonfinite`: skip a step whose loss, gradient, new non_trainables or new weights are not finite: only the
      counts of steps and of skipped steps change. Weights in host memory are written before all of them are known, so
      that only the loss, the gradient and the non_trainables count.
    - `plan`: how the state and the batches are sharded, a `place.Plan`. Feeds take `sharding=plan.batch_sharding`.
    - `compilations`: how many batch signatures to compile for; more than 1 with `train.Buckets`, for example.
    - `privacy`: gradients clipped for each example and noised, `train.DifferentialPrivacy(clip=1.0, noise=1.1)`.
    - `sampled`: for optimizers that estimate the curvature, `optim.SophiaG`: the objective with labels that are sampled
      from the predictions of the model, `jax.random.categorical(rng, logits)`.

    Clipping, weight averaging and accumulation over several batches are wrappers of the optimizer (`mlax.optim`).
    """
    return Step(
        objective,
        optimizer,
        train,
        steps_per_call,
        accumulate,
        scaling,
        skip_nonfinite,
        compilations,
        plan,
        privacy,
        sampled,
    )


@dataclasses.dataclass(repr=False, eq=False)
class Step(metaclass=Documented):
    """A compiled training step, made by `train.step`. `evaluation` evaluates the same objective."""

    _listed = ("advance", "compile", "flops", "init", "init_model", "nonfinite", "start_compile")  # by `help`

    objective: Objective  # like fwd: a loss and new non_trainables
    optimizer: Optimizer  # with the leaves frozen that `train` leaves out
    train: str | tuple[str, ...] | None  # patterns of the leaves to train; None: all
    steps_per_call: int  # by a scan
    accumulate: int  # microbatches of a batch
    scaling: LossScale | None  # of the loss, for float16
    skip_nonfinite: bool  # whether such steps change nothing
    compilations: int  # allowed
    plan: Plan | None  # of shardings
    privacy: DifferentialPrivacy | None  # DP-SGD
    sampled: Objective | None  # an objective with sampled labels
    given_optimizer: Optimizer = dataclasses.field(init=False)
    evaluation: Evaluation = dataclasses.field(init=False)
    aot: CompiledFunction = dataclasses.field(init=False)
    overriding_aot: CompiledFunction = dataclasses.field(init=False)  # for calls that override hyperparameters

    def __post_init__(self):
        check_options(self)
        self.given_optimizer = self.optimizer
        if self.train is not None:
            self.optimizer = train_only(self.optimizer, as_patterns(self.train))
        allowed = max(8, self.compilations)
        self.evaluation = Evaluation(self.objective, self.optimizer, compilations=allowed, plan=self.plan)
        compile_step = functools.partial(
            CompiledFunction,
            donate=True,
            compilations=self.compilations,
            plan=self.plan,
            stacked=self.steps_per_call > 1,
            objective=self.objective,
            keeps_key=True,
        )
        self.aot = compile_step(self._advance_call, ("state", "batch"))
        self.overriding_aot = compile_step(self._advance_call_with, ("state", "hyperparams", "batch"))

    def __call__(self, state: TrainState, batch: Any, **hyperparams: Any) -> tuple[TrainState, Metrics]:
        """The state and the metrics after this batch.

        Hyperparameters, `rate=3e-4` say, override those of the optimizer in this call; new values do not recompile.
        """
        if not isinstance(state, TrainState):
            raise TypeError(f"step: the state is a {type(state).__name__}; call step(state, batch).")
        if isinstance(state.step, jax.Array) and state.step.is_deleted():  # all of it; XLA's error prints C++ lines
            check_not_donated("step", DONATED_STATE, state=state)
        if not hyperparams:
            return self.aot(state, batch)
        return self.overriding_aot(state, self._override(hyperparams), batch)

    def compile(self, state: TrainState, batch: Any, **hyperparams: Any) -> None:
        """Compile for these arguments, which may be `jax.ShapeDtypeStruct`s, unless that is done."""
        function, args = self._compiled_call(state, batch, hyperparams)
        function.compile(*args)

    def start_compile(self, state: TrainState, batch: Any, **hyperparams: Any) -> None:
        """Like `compile`, but XLA compiles in the background; `compile`, or the first call, waits for it."""
        function, args = self._compiled_call(state, batch, hyperparams)
        function.start(*args)

    def _compiled_call(
        self, state: TrainState, batch: Any, hyperparams: dict[str, Any]
    ) -> tuple[CompiledFunction, tuple[Any, ...]]:
        if hyperparams:
            return self.overriding_aot, (state, self._override(hyperparams), batch)
        return self.aot, (state, batch)

    def wait(self) -> None:
        """Wait for what is compiled in the background, whether it succeeds or not."""
        for function in (self.aot, self.overriding_aot, self.evaluation.aot):
            function.wait()

    def __repr__(self) -> str:
        defaults = {"train": None, "steps_per_call": 1, "accumulate": 1, "scaling": None, "skip_nonfinite": True}
        defaults |= {"plan": None, "privacy": None}
        options = [
            f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value
        ]
        if self.sampled is not None:
            options.append(f"sampled={_function_name(self.sampled)}")
        name = _function_name(self.objective)
        return f"train.step({', '.join([name, repr(self.given_optimizer), *options])})"

    def init(self, rng: jax.Array, trainables: Tree, non_trainables: Tree = None) -> TrainState:
        """The first state, sharded as the plan specifies. The variables are not copied: the first step donates them."""
        self._check_trained(trainables)
        return init_state(rng, trainables, non_trainables, self.optimizer, self.scaling, self.plan)

    @pause_garbage_collection()
    def init_model(self, rng: jax.Array, model: Layer, x: Any, batch: Any) -> TrainState:
        """The first state of a model for inputs like `x`, initialized while the step compiles for batches like `batch`.

        `x` and `batch` may be shapes, such as `feed.example`. The model and the state get one half of the key each:
        `init_rng, rng = jax.random.split(rng)`, then `step.init(rng, *model.init(init_rng, x))`. With a plan the step
        is compiled after the model is initialized.
        """
        if self.plan is not None:
            init_rng, rng = random.split(rng)
            state = self.init(rng, *model.init(init_rng, x))
            self.compile(state, batch)
            return state
        variables = variable_shapes(model, x)
        self._check_trained(variables[0])
        self.start_compile(jax.eval_shape(self.init, rng, *variables), shape_dtypes(batch))
        try:
            init_rng, rng = random.split(rng)
            return self.init(rng, *model.init(init_rng, x))
        except BaseException:
            self.wait()
            raise

    def check_constants(self, owner: str) -> None:
        """Raise if what the objective refers to, such as the model, changed since this step was compiled."""
        for function in (self.aot, self.overriding_aot, self.evaluation.aot):
            function.check_constants(owner)

    def flops(self) -> int:
        """FLOPs of one step over all devices, by the jaxpr of the last compilation."""
        return self.last_compiled.flops() // self.steps_per_call

    @property
    def last_compiled(self) -> CompiledFunction:
        """The function that is compiled: the one that takes hyperparameters only if the other was not called."""
        return self.aot if self.aot.compiled else self.overriding_aot

    def nonfinite(self, state: TrainState, batch: Any) -> NonFinite | None:
        """The layer that makes the first NaN or infinity of this step, in the loss, a gradient or the non_trainables.

        None if there is none. The operations of the step run one by one, which is slow; neither argument is donated.
        With `steps_per_call`, the first of the batches that has one is reported, each from the same state.
        """
        number = self.steps_per_call
        batches = [jax.tree.map(lambda leaf, i=i: leaf[i], batch) for i in range(number)] if number > 1 else [batch]
        with contextlib.nullcontext() if self.plan is None else jax.set_mesh(self.plan.mesh):
            found = (self._nonfinite(state._replace(step=state.step + i), each) for i, each in enumerate(batches))
            return next(filter(None, found), None)

    def _nonfinite(self, state: TrainState, batch: Any) -> NonFinite | None:
        rng = random.fold_in(state.rng, state.step)
        floats = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(state.non_trainables)]
        leaves = zip(jax.tree.leaves(state.non_trainables), floats, strict=True)
        was_finite = [is_float and bool(jnp.isfinite(leaf).all()) for leaf, is_float in leaves]

        def results(trainables: Tree, non_trainables: Tree, batch: Any) -> Any:
            given = state._replace(trainables=trainables, non_trainables=non_trainables)
            values, grads, new = self._gradients(self.objective, given, batch, rng)
            leaves = zip(jax.tree.leaves(new), was_finite, strict=True)
            return values["loss"], grads, [leaf for leaf, is_finite in leaves if is_finite]

        return nonfinite(results, trainables=state.trainables, non_trainables=state.non_trainables, batch=batch)

    def _override(self, hyperparams: dict[str, Any]) -> dict[str, jax.Array]:
        """The hyperparameters as arrays of one dtype, so that no value recompiles, on the devices of the plan."""
        self.optimizer.check_overrides(hyperparams)
        dtype = jnp.result_type(float)
        arrays = {name: np.asarray(value, dtype) for name, value in sorted(hyperparams.items())}
        return jax.device_put(arrays, None if self.plan is None else NamedSharding(self.plan.mesh, P()))

    def advance(self, state: TrainState, batch: Any, **hyperparams: Any) -> tuple[TrainState, Metrics]:
        """One step as a pure function, neither compiled nor donating."""
        self._check_trained(state.trainables)
        rng = random.fold_in(state.rng, state.step)
        scale = None if self.scaling is None else state.scaling["scale"]
        values, grads, non_trainables = self._gradients(self.objective, state, batch, rng)
        check_non_trainables(state.non_trainables, non_trainables)
        norm = global_norm(dict(leaves_with_paths(grads)))
        finite = None
        if self.skip_nonfinite:
            stays_finite = all_stay_finite(state.non_trainables, non_trainables)
            finite = jnp.isfinite(norm) & jnp.isfinite(values["loss"]) & stays_finite
        slots = state.optimizer if self.sampled is None else self._estimate(self.sampled, state, batch, rng, finite)
        loss = loss_function(self.objective, batch, state.non_trainables, rng, accumulate=self.accumulate)
        trainables, slots = self.optimizer.update(
            grads,
            slots,
            state.trainables,
            value=values["loss"],
            loss=None if self.privacy is not None else loss,  # whose gradient would be neither clipped nor noised
            loss_scale=scale,
            apply_if=finite,
            skip_nonfinite=self.skip_nonfinite,
            **hyperparams,
        )
        new = state._replace(
            step=state.step + 1,
            trainables=trainables,
            non_trainables=non_trainables,
            average=self.optimizer.update_average(state.average, non_trainables, slots),
            optimizer=slots,
        )
        metrics = {**scalar_metrics(values), "gradient_norm": norm}
        context = UpdateContext(state.optimizer.step, hyperparams)
        rates = self.optimizer.learning_rates(context, state.optimizer._asdict(), slots._asdict())
        metrics |= {name: jnp.asarray(rate, jnp.float32) for name, rate in rates.items()}
        if not self.skip_nonfinite:
            return new, Metrics.pack(metrics)
        skipped = slots.step == state.optimizer.step  # also if the new weights are not finite
        old_state, new_state = ((each.non_trainables, each.average) for each in (state, new))
        kept, average = jax.tree.map(lambda old, new: jnp.where(skipped, old, new), old_state, new_state)
        new = new._replace(non_trainables=kept, average=average, skipped=state.skipped + skipped.astype(jnp.int32))
        metrics["skipped"] = skipped
        if self.scaling is not None:
            new = new._replace(scaling=self.scaling.update(state.scaling, ~skipped))
            metrics["scale"] = state.scaling["scale"]
        return new, Metrics.pack(metrics)

    def _check_trained(self, trainables: Tree) -> None:
        """Raise if `train` matches nothing, or only leaves that the optimizer freezes."""
        if self.train is None or not isinstance(trainables, dict):
            return
        paths = [path for path, _ in leaves_with_paths(trainables)]
        try:
            trained = match_paths(as_patterns(self.train), paths)
        except NoMatch as error:
            raise NoMatch(f"train.step: train: {error}") from None
        if all(map(self.optimizer.is_frozen, trained)):
            raise ValueError(
                f"train.step: {short_repr(self.given_optimizer)} freezes all that train={self.train!r} matches, such "
                f"as {trained[0]!r}; leave out one of the two."
            )

    def _estimate(
        self, sampled: Objective, state: TrainState, batch: Any, rng: jax.Array, finite: jax.Array | None
    ) -> OptimizerState:
        """The slots with a new estimate from sampled labels, if it is due, and finite."""
        key = named_key(rng, "sampled")

        def estimate() -> OptimizerState:
            grads = self._gradients(sampled, state, batch, key).grads
            examples = count_labels(sampled, batch, state.trainables, state.non_trainables, key)
            new = self.optimizer.estimate(grads, state.optimizer, examples)
            usable = jnp.isfinite(global_norm(dict(leaves_with_paths(grads))))
            return jax.tree.map(lambda new, old: jnp.where(usable, new, old), new, state.optimizer)

        due = state.optimizer.step % (self.optimizer.estimate_every() or 1) == 0
        return lax.cond(due if finite is None else due & finite, estimate, lambda: state.optimizer)

    def _gradients(self, objective: Objective, state: TrainState, batch: Any, rng: jax.Array) -> Gradients:
        microbatches, backward = self._microbatches(batch)
        return gradients(
            objective,
            batch,
            state.trainables,
            state.non_trainables,
            rng,
            accumulate=microbatches,
            scale=None if self.scaling is None else state.scaling["scale"],
            backward=backward,
            is_frozen=self.optimizer.is_frozen,
        )

    def _microbatches(self, batch: Any) -> tuple[int, Backward | None]:
        """How many microbatches a batch is split into, and what computes their gradients, if not a scan."""
        if self.privacy is not None:
            return jax.tree.leaves(batch)[0].shape[0], self.privacy.backward
        pipeline = pipeline_with_backward(self)
        return (self.accumulate, None) if pipeline is None else (pipeline.microbatches, pipeline.backward)

    def _advance_call(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """All steps of a call."""
        return self._advance_call_with(state, {}, batch)

    def _advance_call_with(
        self, state: TrainState, hyperparams: dict[str, jax.Array], batch: Any
    ) -> tuple[TrainState, Metrics]:
        """All steps of a call, with these hyperparameters."""
        if self.steps_per_call == 1:
            return self.advance(state, batch, **hyperparams)
        check_stacked(self.steps_per_call, batch)

        def advance(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
            return self.advance(state, batch, **hyperparams)

        unroll = UNROLL if jax.default_backend() == "gpu" and is_small(state) else 1
        return lax.scan(advance, state, batch, length=self.steps_per_call, unroll=min(unroll, self.steps_per_call))


def _function_name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))
