"""TrainState: everything that training changes, as one pytree."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import random

from mlax._jax import are_on_one_device, is_typed_key, leaves_with_paths
from mlax.core import Tree, check_not_donated, document_tuple, print_as_table, short_signature, signature
from mlax.optim import Optimizer, OptimizerState
from mlax.place import Plan
from mlax.train._loss_scale import LossScale

DONATED_STATE = (
    "use the state that it returned, `result.state` of `fit` or `state, metrics = step(state, batch)`, or, to run a "
    "notebook's cell again, first run the one that makes the state."
)
DONATED_VARIABLES = (
    "`step.init` does not copy the variables, and the first `step` or `fit` donates them, so call `model.init` again, "
    "or pass copies, jax.tree.map(jnp.copy, variables)."
)


@document_tuple
@print_as_table
class TrainState(NamedTuple):
    """What a step reads and writes, and what a checkpoint stores.

    `step` is also the position in the data, since a feed is a function of it. `rng` stays the same: each step folds its
    number into it.
    """

    step: jax.Array  # () int32, batches seen so far, skipped ones included
    trainables: Tree  # the weights
    non_trainables: Tree  # running statistics and caches
    average: Tree  # of running statistics (mean and var), if the optimizer averages the weights; else None
    optimizer: OptimizerState  # its slots
    rng: jax.Array  # a key
    scaling: Any  # state of the loss scale; None without one
    skipped: jax.Array  # () int32, steps skipped because something was not finite

    def eval_variables(self, optimizer: Optimizer) -> tuple[Tree, Tree]:
        """The trainables and non_trainables to evaluate and to export: averages, if the optimizer keeps them.

        `optimizer` is that of the step, `step.optimizer`, which also knows what `train=` leaves out.
        """
        try:
            trainables = optimizer.eval_trainables(self.optimizer, self.trainables)
        except (TypeError, ValueError) as error:
            error.add_note("eval_variables: pass the optimizer of the step, step.optimizer.")
            raise
        return trainables, optimizer.eval_non_trainables(self.average, self.non_trainables)


def init_state(
    rng: jax.Array,
    trainables: Tree,
    non_trainables: Tree,
    optimizer: Optimizer,
    scaling: LossScale | None,
    plan: Plan | None,
) -> TrainState:
    """The state before the first step, sharded as the plan specifies. It holds these variables, not copies of them."""
    _check_variables(rng, trainables, non_trainables)
    if plan is not None:
        trainables, non_trainables = plan.place((trainables, non_trainables))
        slots = plan.init_slots(optimizer, trainables)
        rest = _init_rest(optimizer, scaling, rng, slots, non_trainables)
    elif are_on_one_device((trainables, non_trainables)):
        slots, rest = _init_on_one_device(optimizer, scaling, rng, trainables, non_trainables)
    else:
        slots = optimizer.init(trainables)
        rest = _init_rest(optimizer, scaling, rng, slots, non_trainables)
    return TrainState(trainables=trainables, non_trainables=non_trainables, optimizer=slots, **rest)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _init_on_one_device(
    optimizer: Optimizer, scaling: LossScale | None, rng: jax.Array, trainables: Tree, non_trainables: Tree
) -> tuple[OptimizerState, dict[str, Any]]:
    """The slots and the rest of the state by one program, which compiles faster than dozens of tiny ones."""
    slots = optimizer.init(trainables)
    return slots, _init_rest(optimizer, scaling, rng, slots, non_trainables)


def _init_rest(
    optimizer: Optimizer, scaling: LossScale | None, rng: jax.Array, slots: OptimizerState, non_trainables: Tree
) -> dict[str, Any]:
    """The fields of the state besides the variables and the slots."""

    def copy(leaf: jax.Array) -> jax.Array:
        """A copy on the devices of the weights, since the whole state is donated."""
        return jnp.zeros_like(slots.step, leaf.dtype) + leaf

    zero = jnp.zeros_like(slots.step)
    return {
        "step": zero,
        "average": optimizer.init_average(non_trainables),
        "rng": random.wrap_key_data(copy(random.key_data(rng)), impl=str(random.key_impl(rng))),
        "scaling": None if scaling is None else jax.tree.map(copy, scaling.init()),
        "skipped": jnp.copy(zero),
    }


def _check_variables(rng: jax.Array, trainables: Tree, non_trainables: Tree) -> None:
    if not is_typed_key(rng):
        raise TypeError(
            f"step.init: rng is {short_signature(rng)}, but must be a key; call step.init(rng, *variables) with "
            "rng=jax.random.key(0), for example."
        )
    if not isinstance(trainables, dict):
        raise TypeError(
            f"step.init: trainables is {signature(trainables)}, but must be a dict of arrays; pass the pair that "
            "model.init returns as two arguments: step.init(rng, *model.init(...))."
        )
    variables = {"rng": rng, "trainables": trainables, "non_trainables": non_trainables}
    check_not_donated("step.init", DONATED_VARIABLES, **variables)
    seen: dict[int, str] = {}
    for path, leaf in leaves_with_paths({"trainables": trainables, "non_trainables": non_trainables}):
        if id(leaf) in seen:
            raise ValueError(
                f"step.init: {path} and {seen[id(leaf)]} are the same array, which cannot be donated twice; store tied "
                "weights once (mlax.Tied), or copy one of them."
            )
        seen[id(leaf)] = path
