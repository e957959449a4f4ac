"""The beginning of a run: where it goes on from, what changed since, and what people are told."""

from collections.abc import Mapping
from typing import Any

import jax

from mlax.train._log import cut_after
from mlax.train._parameters import parameters
from mlax.train._run import Run
from mlax.train._state import State
from mlax.train.checkpoints._best import Highest, Lowest
from mlax.train.checkpoints._checkpoints import Checkpoints
from mlax.train.checkpoints._matched import Unlike


def opened(folder: Run, keep: int, best: Highest | Lowest | None, resume: bool) -> Checkpoints | None:
    """The checkpoints of a run, if it has a folder; one that is not to be resumed must have none."""
    if folder.folder is None:
        return None
    checkpoints = Checkpoints(folder.folder / "checkpoints", keep=keep, best=best)
    if not resume and checkpoints.latest() is not None:
        raise FileExistsError(
            f"fit: {folder.folder} holds a run at step {checkpoints.latest()}, and resume=False would write over it; "
            "choose another folder, or remove this one."
        )
    return checkpoints


def resumed(folder: Run, checkpoints: Checkpoints | None, state: State) -> tuple[int, State, Mapping[str, Any]]:
    """The step to go on from, its state, and what was noted with it."""
    at, notes = int(state.step), {}
    if checkpoints is not None and checkpoints.latest() is not None:
        try:
            restored = checkpoints.restore(state)
        except Unlike as error:
            raise ValueError(
                f"fit: {folder.folder} holds the run of another model or optimizer: {error.fault}; "
                "choose another folder for run=, or put the old ones back."
            ) from None
        jax.tree.map(lambda leaf: leaf.delete(), state)  # donated, as it would be by the first step
        at, state, notes = restored.step, restored.tree, restored.notes
    metrics = folder.path("metrics.jsonl")
    if metrics is not None and folder.leads:
        cut_after(metrics, at)
    return at, state, notes


def settled(folder: Run, parts: Mapping[str, Any], at: int, steps: int) -> list[str]:
    """Note the configuration of a run, and give what is not as it was when it began, in words.

    A run that is finished stays as it is, and cannot be of something else.
    """
    changed = folder.changed(parts)
    if changed and at >= steps:
        raise ValueError(
            f"fit: {folder.folder} holds a finished run, {at} of {steps} steps, of something else "
            f"({'; '.join(changed)}); choose another folder for this one."
        )
    if at < steps:
        folder.settle(parts)
    return [f"changed since this run began: {words}" for words in changed]


def introduction(folder: Run, parts: Mapping[str, Any], changed: list[str], state: State, at: int) -> str:
    """What is trained, on what, how, and a table of its parameters."""
    where = "nowhere: nothing is saved" if folder.folder is None else f"{folder.folder}"
    lines = {"run": f"{where}, goes on from step {at}" if at else where, **parts}
    width = max(map(len, lines)) + 2
    table = parameters(state.trainables)
    return "\n".join([*(f"{name:{width}}{value}" for name, value in lines.items()), *changed, "parameters", table])


def seed(state: State) -> str:
    """The key of a run, as numbers."""
    return f"{jax.random.key_impl(state.rng)} {jax.random.key_data(state.rng).tolist()}"
