"""Export of the last and the best weights of a run to safetensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from mlax import files
from mlax.core import Tree
from mlax.train._run import Run
from mlax.train._state import TrainState
from mlax.train._step import Step
from mlax.train.checkpoints._checkpoints import Checkpoints


def export_weights(
    folder: Run, step: Step, state: TrainState, checkpoints: Checkpoints | None, say: Callable[[str], None]
) -> None:
    """Write the weights to evaluate with. Several processes call it together, and the first one writes."""
    last, best = folder.path("last.safetensors"), folder.path("best.safetensors")
    if last is None or best is None or checkpoints is None:
        return
    try:
        _write(last, _weights_for_inference(step, state))
        if checkpoints.by is not None and (number := checkpoints.best()) is not None:
            _write(best, _weights_for_inference(step, checkpoints.restore(state, step=number).tree))
    except Exception as failure:  # everything is in the checkpoints: nothing is worth losing what `fit` returns
        say(f"the weights could not be written to {last.parent}: {failure}")


def _weights_for_inference(step: Step, state: TrainState) -> Tree:
    trainables = step.optimizer.averaged(state.optimizer, state.trainables)
    both = {"trainables": trainables, "non_trainables": state.non_trainables}
    return {name: tree for name, tree in both.items() if tree is not None}


def _write(path: Path, weights: Tree) -> None:
    gathered = jax.tree.map(_gather, weights)
    if jax.process_index() == 0:
        files.save(path, gathered)


def _gather(leaf: jax.Array) -> Any:
    """The whole leaf; on the host of the first process, where parts of it were with others."""
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return leaf
    from jax.experimental import multihost_utils

    whole = multihost_utils.process_allgather(leaf, tiled=True)
    return whole if jax.process_index() == 0 else None
