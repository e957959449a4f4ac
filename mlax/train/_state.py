"""TrainState: everything that training changes, in one tree."""

from typing import Any, NamedTuple

import jax

from mlax.core import Tree
from mlax.optim import OptimizerState


class TrainState(NamedTuple):
    """All that a step reads and writes, and all that a checkpoint needs to hold.

    `step` is also the position in the data, since a feed is a function of it. The key of a step is folded from `rng`,
    which stays the same.
    """

    step: jax.Array  # () int32, batches seen so far, skipped ones too
    trainables: Tree
    non_trainables: Tree
    optimizer: OptimizerState
    rng: jax.Array  # a key
    scaling: Any  # of the loss, as its description keeps it; None without one
    skipped: jax.Array  # () int32, steps that were not taken since something was not finite
