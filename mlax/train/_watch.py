"""Watch: everything about a run that is for people: the log, the bar, the curves, what was skipped."""

from collections.abc import Mapping
from typing import Any, Self

import jax

from mlax.inspect import flops, used_bytes
from mlax.train._board import Board
from mlax.train._log import Log
from mlax.train._metrics import Metrics
from mlax.train._progress import Progress
from mlax.train._run import Run
from mlax.train._skipping import Skipping
from mlax.train._speed import speed
from mlax.train._state import State
from mlax.train._step import Step
from mlax.train.checkpoints._checkpoints import Checkpoints


class Watch:
    """Shows and notes how training goes, and looks after steps that were not finite."""

    def __init__(
        self, run: Run, step: Step, feed: Any, start: int, steps: int, rollbacks: int, tensorboard: bool, show: bool
    ):
        self.run, self.step, self.steps = run, step, steps
        self.log = Log(run.path("metrics.jsonl") if run.leads else None, many=step.many)
        self.board = Board(run.path("tensorboard") if tensorboard and run.leads else None, start=start)
        self.progress = Progress(start, steps, show=show)
        self.skipping = Skipping(feed, rollbacks=rollbacks)
        self.examples = getattr(feed, "batch", 0)
        self.say = self.progress.say
        self._flops: int | None = None

    def __enter__(self) -> Self:
        self.progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.log.flush()
        self.board.close()
        self.progress.__exit__()

    def after(
        self,
        at: int,
        metrics: Metrics,
        state: State,
        checkpoints: Checkpoints | None,
        *,
        caught_up: bool = False,
    ) -> State:
        """Take the metrics of the call that ended with step `at`; give the state to go on with.

        With `caught_up` all that is known by then is read, as it must be before anything is saved.
        """
        if self._flops is None:
            self._flops = flops(self.step.once.program()[0].jaxpr) // self.step.many
            self.progress.clock(at)
        records = self.log.add(at, metrics)
        if caught_up:
            records += self.log.read()
        if not records:
            return state
        done = records[-1]["step"]
        words = speed(self.progress.clock(done), self.examples, self._flops)
        self.progress.show(done, records[-1], words, used_bytes(jax.local_devices()[0]))
        self.board.add(records)
        self.run.draw()
        return self.skipping.after(records, state, checkpoints, self.log, self.say)

    def evaluated(self, at: int, scores: Mapping[str, float]) -> Mapping[str, float]:
        """Note the scores of an evaluation, and give them back."""
        self.log.write({"step": at, "evaluation": dict(scores)})
        self.log.flush()
        self.board.add([{"step": at, **scores}], "evaluation")
        self.progress.evaluated(at, scores)
        return scores
