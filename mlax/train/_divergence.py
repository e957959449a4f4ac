"""Divergence: skipped steps in a row, and the rollback to a checkpoint before them."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mlax.core import Documented
from mlax.files import InvalidFile
from mlax.inspect import NonFinite
from mlax.train._metrics import Record
from mlax.train._monitor import Monitor
from mlax.train._state import TrainState
from mlax.train.checkpoints._checkpoints import Checkpoints
from mlax.train.checkpoints._restore import RestoredCheckpoint

_RECOVERY = 10  # times `patience`: training that has gone on for so many steps has recovered


class Diverged(FloatingPointError, metaclass=Documented):
    """The loss, a gradient or the result was not finite in many steps in a row, and rolling back did not help.

    The message names the layer of the first NaN, if it was found. `state` is the state after these steps, to look
    further: `step.nonfinite(error.state, batch)`.
    """

    def __init__(self, message: str, state: TrainState):
        super().__init__(message)
        self.state = state


class StableStep(NamedTuple):
    """The checkpoint whose weights did best in training: the steps after it had the lowest mean loss.

    Weights can diverge long before a step is not finite, and then all of the last checkpoints hold them. This one
    does not, and it is kept.
    """

    step: int
    loss: float


class Divergence:
    """Counts the steps that were skipped in a row, and rolls back after `patience` of them.

    A rollback restores weights and slots of the last checkpoint before the first skipped step; the data continues where
    it is. If that did not help, the next one restores an older checkpoint: the `stable` one, or the oldest. After
    `rollbacks` of them `Diverged` is raised. `saved` is the checkpoint that training resumes from.
    """

    def __init__(
        self,
        feed: Any,
        checkpoints: Checkpoints | None,
        monitor: Monitor,
        *,
        rollbacks: int = 2,
        patience: int = 20,
        saved: int | None = None,
        stable: Sequence[Any] | None = None,
    ):
        self.feed = feed
        self.checkpoints = checkpoints
        self.monitor = monitor
        self.rollbacks = rollbacks  # how many are left
        self.patience = patience
        self.skipped: list[int] = []  # the latest steps, if all of them were skipped
        self._cause = ""  # of the last one
        self.stable = None if stable is None else StableStep(*stable)
        self._saved = saved  # the step of the last checkpoint
        self._losses: list[float] = []  # of the steps since then
        self._restored: int | None = None  # the step of the last rollback
        self._rolled_back_at = 0
        self._layer: str | None = None  # where the first NaN is made; None: not searched for yet

    def count(self, records: Sequence[Record]) -> bool:
        """Log each skipped step with the ids of its examples; returns whether it is time to roll back."""
        for record in records:
            if not record.get("skipped"):
                self.skipped = []
                self._losses.append(record.get("loss", math.nan))
                continue
            self.skipped.append(record["step"])
            self._cause = _describe_cause(record)
            self.monitor.log_event(
                record["step"], f"skipped: {_describe_cause(record)}", ids=self._example_ids(record["step"])
            )
            if len(self.skipped) == 1:
                self.monitor.print(_describe_skip(record))
        return len(self.skipped) >= self.patience

    def roll_back(self, state: TrainState, find_nonfinite: Callable[[], NonFinite | None]) -> TrainState:
        """The state of the last checkpoint before the skipped steps, with the present count of steps."""
        first, last = self.skipped[0], self.skipped[-1]
        self.skipped = []
        if self._layer is None:
            self._layer = _describe_layer(find_nonfinite)
            if self._layer:
                self.monitor.log_event(last, self._layer)
        restored = self._restore_before(first, state) if self.rollbacks else None
        if restored is None:
            raise Diverged(_describe_divergence(first, last, self._cause, self._layer), state)
        self.rollbacks -= 1
        self._restored, self._rolled_back_at = restored.step, last
        self._saved, self._losses = restored.step, []
        self.monitor.warn(
            f"steps {first} to {last} were not finite: rolled back to the weights of step {restored.step}; "
            f"the data continues{'; ' * bool(self._layer)}{self._layer.partition(chr(10))[0]}"
        )
        self.monitor.log_event(last, f"rolled back to the weights of step {restored.step}")
        return restored.tree._replace(step=state.step, skipped=state.skipped)

    def _example_ids(self, step: int) -> list[int] | None:
        if not hasattr(self.feed, "padded_indices"):
            return None
        return np.unique(self.feed.padded_indices(step - 1)).tolist()  # steps count from 1, batches from 0

    def update_stable(self, step: int) -> StableStep | None:
        """The stable checkpoint, given that `step` is about to be saved: the one before that may be it."""
        saved, losses = self._saved, self._losses
        self._saved, self._losses = step, []
        mean = sum(losses) / len(losses) if losses else math.nan
        is_lowest = math.isfinite(mean) and (self.stable is None or mean <= self.stable.loss)
        with contextlib.suppress(OSError):  # the save that follows reports a folder that cannot be read
            if is_lowest and self.checkpoints is not None and saved is not None and self.checkpoints.has(saved):
                self.stable = StableStep(saved, mean)
        return self.stable

    def _restore_before(self, first: int, state: TrainState) -> RestoredCheckpoint | None:
        """The first checkpoint before step `first` that can be restored, in the order in which they are worth trying.

        Waits for saves, so that all processes find the same ones.
        """
        if self.checkpoints is None:
            return None
        try:
            self.checkpoints.wait()
        except Exception as failure:
            self.monitor.warn(f"a save failed: {failure}")
        for step in self._candidates(first, self.checkpoints):
            try:
                return self.checkpoints.restore(state, step=step)
            except InvalidFile as error:
                self.monitor.warn(f"step {step} cannot be restored: {error}")
        return None

    def _candidates(self, first: int, checkpoints: Checkpoints) -> list[int]:
        before = [step for step in reversed(checkpoints.steps()) if step < first]
        if self._restored is None or first - self._rolled_back_at > _RECOVERY * self.patience:
            return before
        older = [step for step in before if step < self._restored]  # what was restored last did not help
        stable = None if self.stable is None else self.stable.step
        return sorted(older, key=lambda step: (step != stable, step))


def _describe_skip(record: Record) -> str:
    if "scale" in record:
        return f"step {record['step']} overflowed at a loss scale of {record['scale']:g} and was skipped"
    return f"step {record['step']} was skipped: {_describe_cause(record)}; see the log"


def _describe_cause(record: Record) -> str:
    """What of a skipped step was not finite."""
    for name, value in (("the loss", record.get("loss")), ("the gradient", record.get("gradient_norm"))):
        if value is None or not math.isfinite(value):
            return f"{name} is not finite"
    return "its new weights or non_trainables, BatchNorm's statistics say, are not finite"


def _describe_layer(find_nonfinite: Callable[[], NonFinite | None]) -> str:
    """Where the first NaN is made; empty if it is not found, whatever the reason: the run goes on without it."""
    if jax.process_count() > 1:  # the others would have to take part
        return ""
    try:
        found = find_nonfinite()
    except Exception:
        return ""
    return "" if found is None else str(found)


def _describe_divergence(first: int, last: int, cause: str, layer: str) -> str:
    find = (
        f"To find the layer, catch this error and call `step.nonfinite(error.state, batch)` with a batch of "
        f"feed.stream({last - 1}, {last})."
    )
    where = f"Of the last batch, {layer}\n" if layer else f"{find} "
    return (
        f"none of the steps {first} to {last} was finite, which left the weights unchanged; of step {last}, {cause}. "
        f"{where}Lower the learning rate, clip the gradients (optim.ClipGlobalNorm), compute in a wider dtype, or mend "
        "the examples of these steps, whose ids are in the log: a label or an id out of range is another cause."
    )
