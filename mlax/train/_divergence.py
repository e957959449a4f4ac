"""Divergence: skipped steps in a row, and the rollback to the last checkpoint before them."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlax.train._metrics import Record
from mlax.train._monitor import Monitor
from mlax.train._state import TrainState
from mlax.train.checkpoints._checkpoints import Checkpoints


class Diverged(FloatingPointError):
    """The loss or a gradient was not finite in many steps in a row, and rolling back did not help."""


class Divergence:
    """Counts the steps that were skipped in a row, and rolls back after `patience` of them.

    A rollback restores weights and slots of the last checkpoint before the first skipped step; the data continues where
    it is. After `rollbacks` of them `Diverged` is raised.
    """

    def __init__(
        self, feed: Any, checkpoints: Checkpoints | None, monitor: Monitor, *, rollbacks: int = 2, patience: int = 20
    ):
        self.feed = feed
        self.checkpoints = checkpoints
        self.monitor = monitor
        self.rollbacks = rollbacks  # how many are left
        self.patience = patience
        self.skipped: list[int] = []  # the latest steps, if all of them were skipped

    def count(self, records: Sequence[Record]) -> bool:
        """Log each skipped step with the ids of its examples; returns whether it is time to roll back."""
        for record in records:
            if not record.get("skipped"):
                self.skipped = []
                continue
            self.skipped.append(record["step"])
            self.monitor.log_event(
                record["step"], "skipped: the loss or a gradient is not finite", ids=self._example_ids(record["step"])
            )
            if len(self.skipped) == 1:
                self.monitor.print(_describe_skip(record))
        return len(self.skipped) >= self.patience

    def roll_back(self, state: TrainState) -> TrainState:
        """The state of the last checkpoint before the skipped steps, with the present count of steps."""
        first, last = self.skipped[0], self.skipped[-1]
        self.skipped = []
        good = self._last_saved_before(first) if self.rollbacks else None
        if self.checkpoints is None or good is None:
            raise Diverged(
                f"the loss or a gradient was not finite in any of the steps {first} to {last}, which left the weights "
                "unchanged. Lower the learning rate, clip the gradients (optim.ClipGlobalNorm), compute in a wider "
                "dtype, or look at the examples of these steps, whose ids are in the log: a label or an id out of "
                "range is another cause."
            )
        self.rollbacks -= 1
        restored = self.checkpoints.restore(state, step=good)
        self.monitor.print(
            f"steps {first} to {last} were not finite: rolled back to the weights of step {good}; the data continues"
        )
        self.monitor.log_event(last, f"rolled back to the weights of step {good}")
        return restored.tree._replace(step=state.step, skipped=state.skipped)

    def _example_ids(self, step: int) -> list[int] | None:
        if not hasattr(self.feed, "indices"):
            return None
        ids = np.asarray(self.feed.indices(step - 1))  # steps count from 1, batches from 0
        return ids[ids >= 0].tolist()

    def _last_saved_before(self, first: int) -> int | None:
        """The last step saved before `first`; waits for saves, so that all processes find the same one."""
        if self.checkpoints is None:
            return None
        with contextlib.suppress(OSError):  # `fit` reports a failed save
            self.checkpoints.wait()
        return max((step for step in self.checkpoints.steps() if step < first), default=None)


def _describe_skip(record: Record) -> str:
    if "scale" in record:
        return f"step {record['step']} overflowed at a loss scale of {record['scale']:g} and was skipped"
    return f"step {record['step']} was skipped: the loss or a gradient is not finite; see the log"
