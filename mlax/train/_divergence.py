"""Rollback to a checkpoint after many non-finite steps in a row."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlax.train._metrics import MetricsLog, Record
from mlax.train._state import TrainState
from mlax.train.checkpoints._checkpoints import Checkpoints


class Diverged(FloatingPointError):
    """Step after step had a loss or a gradient that was not finite, and going back did not help."""


class Divergence:
    """Notes each skipped step with the ids of its examples. After `patience` of them in a row it goes back.

    To go back is to take weights and slots from the last checkpoint before the bad steps, and to go on with the data
    after them. It does so at most `rollbacks` times, then raises `Diverged`.
    """

    def __init__(self, feed: Any, *, rollbacks: int = 2, patience: int = 20):
        self.feed = feed
        self.left = rollbacks
        self.patience = patience
        self.row: list[int] = []  # the last steps, as far as they were skipped one after another

    def after(
        self,
        records: Sequence[Record],
        state: TrainState,
        checkpoints: Checkpoints | None,
        log: MetricsLog,
        say: Callable[[str], None],
    ) -> TrainState:
        """The state to go on with."""
        for record in records:
            if not record.get("skipped"):
                self.row = []
                continue
            self.row.append(record["step"])
            ids = self._ids(record["step"])
            log.write({"step": record["step"], "event": "skipped: the loss or a gradient is not finite", "ids": ids})
            if len(self.row) == 1:
                say(_skip_message(record))
        if len(self.row) < self.patience:
            return state
        first, last = self.row[0], self.row[-1]
        self.row = []
        good = _last_saved_before(checkpoints, first) if self.left else None
        if checkpoints is None or good is None:
            raise Diverged(
                f"the loss or a gradient was not finite in steps {first} to {last}, without exception. None of them "
                "changed the weights. Lower the rate, clip the gradients (optim.ClipGlobalNorm), compute in a wider "
                "dtype, or look at the examples of these steps in the log: a label or an id out of range does it too."
            )
        self.left -= 1
        restored = checkpoints.restore(state, step=good)
        say(f"steps {first} to {last} were not finite: back to the weights of step {good}, on with new data")
        log.write({"step": last, "event": f"back to the weights of step {good}"})
        return restored.tree._replace(step=state.step, skipped=state.skipped)

    def _ids(self, step: int) -> list[int] | None:
        if not hasattr(self.feed, "indices"):
            return None
        ids = np.asarray(self.feed.indices(step - 1))  # the first step is that of the batch 0
        return ids[ids >= 0].tolist()


def _skip_message(record: Record) -> str:
    if "scale" in record:
        return f"step {record['step']} overflowed at a loss scale of {record['scale']:g} and was skipped"
    return f"step {record['step']} was skipped: the loss or a gradient is not finite; see the log"


def _last_saved_before(checkpoints: Checkpoints | None, first: int) -> int | None:
    """The last step saved before `first`, once nothing is being written: all processes are to find the same."""
    if checkpoints is None:
        return None
    with contextlib.suppress(OSError):  # a save that failed is told of elsewhere
        checkpoints.wait()
    return max((step for step in checkpoints.steps() if step < first), default=None)
