"""Export of the last and the best weights of a run to safetensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from mlax import files
from mlax.core import Tree
from mlax.train._run import Run
from mlax.train._state import TrainState
from mlax.train._step import Step
from mlax.train.checkpoints._checkpoints import Checkpoints


def export_weights(
    run: Run, step: Step, state: TrainState, checkpoints: Checkpoints | None, report: Callable[[str], None]
) -> None:
    """Write the weights to evaluate with, last and best. All processes must call it; the first one writes."""
    last, best = run.path("last.safetensors"), run.path("best.safetensors")
    if last is None or best is None or checkpoints is None:
        return
    try:
        _write(last, _inference_variables(step, state))
        if checkpoints.by is not None and (number := checkpoints.best()) is not None:
            _write(best, _inference_variables(step, checkpoints.restore(state, step=number).tree))
    except Exception as failure:  # the checkpoints hold everything, and `fit` should still return
        report(f"the weights could not be written to {last.parent}: {failure}")


def _inference_variables(step: Step, state: TrainState) -> Tree:
    trainables = step.optimizer.averaged(state.optimizer, state.trainables)
    variables = {"trainables": trainables, "non_trainables": state.non_trainables}
    return {name: tree for name, tree in variables.items() if tree is not None}


def _write(path: Path, variables: Tree) -> None:
    gathered = jax.tree.map(_gather, variables)
    if jax.process_index() == 0:
        files.save(path, gathered)


def _gather(leaf: jax.Array) -> Any:
    """The whole leaf; if other processes hold parts of it, on the host of the first process only."""
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return leaf
    whole = multihost_utils.process_allgather(leaf, tiled=True)
    return whole if jax.process_index() == 0 else None
