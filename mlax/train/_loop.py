"""The loop of `fit`: a run in progress, which steps, evaluates, calls back and saves."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from mlax._supervision import Phase
from mlax.inspect import NonFinite, free_bytes
from mlax.train._callback import Callback
from mlax.train._divergence import Divergence
from mlax.train._metrics import Metrics, Record
from mlax.train._monitor import Monitor
from mlax.train._profile import Profile
from mlax.train._run import Resume
from mlax.train._scoring import Scoring
from mlax.train._signals import Signals, heartbeat
from mlax.train._state import TrainState
from mlax.train._step import Step
from mlax.train.checkpoints._checkpoints import Checkpoints

UNFUSED = 4  # operation by operation, a step may take so many times the memory for intermediate results


class Intervals(NamedTuple):
    """How many steps there are in all, between two evaluations, and between two checkpoints."""

    steps: int
    evaluate_every: int
    save_every: int


class EarlyStop(NamedTuple):
    """Why a run ended before its last step, how many steps it was to have, and whether it was out of patience."""

    reason: str
    steps: int
    patience: bool


@dataclasses.dataclass(kw_only=True)
class Loop:
    """A run in progress: its state, the step that it has reached, the last metrics and scores, and what is saved."""

    step: Step
    state: TrainState
    scoring: Scoring
    callback: Callback | None
    checkpoints: Checkpoints | None
    monitor: Monitor
    profile: Profile
    divergence: Divergence
    signals: Signals
    hyperparams: Callable[[int], Mapping[str, Any]] | None
    intervals: Intervals
    current_step: int
    notes: dataclasses.InitVar[Mapping[str, Any]]  # of the checkpoint that training resumes from

    def __post_init__(self, notes: Mapping[str, Any]):
        self.saved_step = self.current_step
        # of the present step; JSON has no NaN
        self.metrics = {name: math.nan if value is None else value for name, value in notes.get("metrics", {}).items()}
        self.owes_callback: bool = self.callback is not None and bool(notes.get("owes_callback"))
        self.stop = EarlyStop(*notes["stop"]) if notes.get("stop") else None
        self.position: Callable[[], Any] = lambda: notes.get("feed")  # in the data
        self.batch: Any = None  # of the last call

    def train(self, batches: Any) -> None:
        """Train on all batches, or until something stops it; evaluate, call back and save where due, and at the end."""
        self.position = batches.position
        prepared = False
        for batch in batches:
            hyperparams = {} if self.hyperparams is None else self.hyperparams(self.current_step)
            if not prepared:  # even if the step was compiled before, `best` and the evaluation are new
                self._prepare(batch, hyperparams)
                prepared = True
            metrics = self._call_step(batch, hyperparams)
            self._evaluate_and_save(metrics, ending=self._is_last() or bool(self.signals.poll_all()))
            if not self.can_train() or self.signals.pending():
                break
            heartbeat(self.current_step, Phase.WAITING_FOR_DATA)
        self._read(self.monitor.log_rest())  # a signal may have ended the wait for data
        if self.current_step > self.saved_step:
            self._save()
        heartbeat(self.current_step, Phase.ENDING)

    def _call_step(self, batch: Any, hyperparams: Mapping[str, Any]) -> Metrics:
        heartbeat(self.current_step, Phase.STEP)
        end = self.current_step + self.step.steps_per_call
        self.profile.before(self.current_step + 1, end, self.state)
        self.batch = batch
        self.state, metrics = self.step(self.state, batch, **hyperparams)
        self.current_step = end
        self.profile.after(self.current_step, self.state)
        heartbeat(self.current_step, Phase.AFTER_STEP)
        return metrics

    def _evaluate_and_save(self, metrics: Metrics, *, ending: bool) -> None:
        evaluating = self._evaluation_is_due()
        calling = self.callback is not None and (
            evaluating or self.callback.is_due(self.current_step - self.step.steps_per_call, self.current_step)
        )
        saving = ending or self.current_step % self.intervals.save_every == 0
        self._read(self.monitor.log_metrics(self.current_step, metrics, wait=evaluating or calling or saving))
        if evaluating and not self.signals.pending():
            saving = self._evaluate() or saving
        self.owes_callback = calling
        if calling and not self.signals.pending():
            self.call_back()
        # amid skipped steps only the last one is saved, since retention might delete the checkpoint before them
        if ending or self.stop is not None or (saving and not self.divergence.skipped):
            self._save()

    def reconsider_stop(self, resume: Resume) -> None:
        """Continue a run that had ended early, if it is resumed with more steps, more patience, or "anyway"."""
        if self.stop is None:
            return
        has_patience = self.stop.patience and not self.scoring.out_of_patience()
        if resume == "anyway" or self.stop.steps != self.intervals.steps or has_patience:
            self.stop = None
            self.scoring.restart_patience()

    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return not self.can_train() and not self.lacks_scores() and not self.owes_callback

    def can_train(self) -> bool:
        """Whether steps are left, and nothing has stopped the run."""
        return not self._is_last() and self.stop is None

    def lacks_scores(self) -> bool:
        """Whether the present step is to be evaluated, and was not: a signal may have ended the evaluation."""
        return self._evaluation_is_due() and self.scoring.step != self.current_step

    def catch_up(self) -> None:
        """After resuming: evaluate this step and call back, if that is missing, and save."""
        saving = False
        if self.lacks_scores():
            with self.signals.killable():
                heartbeat(self.current_step, Phase.COMPILING)
                self.scoring.prepare(self.state)
            self._evaluate()
            saving = not self.lacks_scores()
        if self.owes_callback and not self.signals.pending():
            self.call_back()
            saving = True
        if saving:
            self._save()

    def call_back(self) -> None:
        """Call `each` with the present state, the metrics of this step and the scores, if it was evaluated.

        If it raises, the state is saved first, and the resumed run calls it again.
        """
        assert self.callback is not None
        scores = self.scoring.scores if self.scoring.step == self.current_step else {}
        heartbeat(self.current_step, Phase.CALLBACK)
        try:
            with self.signals.unkillable():  # only the sender of a signal knows how long this may take
                reason = self.callback(self.current_step, self.state, self.metrics, scores)
        except (Exception, SystemExit):
            self._save()
            self.last_on_disk()
            raise
        self.owes_callback = False
        if reason:
            self._stop_early(reason, patience=False)
        heartbeat(self.current_step, Phase.AFTER_STEP)

    def last_on_disk(self) -> int | None:
        """Wait until nothing is being written; returns the last step on disk."""
        if self.checkpoints is None:
            return None
        try:
            self.checkpoints.wait()
        except Exception as failure:
            self.monitor.warn(f"the last save failed: {failure}")
        try:
            return self.checkpoints.latest()
        except Exception as failure:  # whatever is wrong with the folder, the trained weights are here
            self.monitor.warn(f"the checkpoints cannot be read: {failure}")
            return None

    def summary(self) -> dict[str, Any]:
        """How far training got, how many of its steps were skipped, and the last and best scores."""
        skipped, best, scored = int(self.state.skipped), self.scoring.best, self.scoring.step
        criterion = self.scoring.criterion
        return {
            "reached": f"step {self.current_step:,} of {self.intervals.steps:,}",
            **({"stopped": self.stop.reason} if self.stop is not None else {}),
            **({"skipped": f"{skipped:,} steps, which were not finite"} if skipped else {}),
            **({} if scored in (None, self.current_step) else {"evaluated": f"step {scored:,}"}),
            **self.scoring.scores,
            **(
                {"best so far": f"{criterion.metric} {best.score:.4g} at step {best.step:,}"}
                if criterion is not None and best.score is not None
                else {}
            ),
        }

    def _prepare(self, batch: Any, hyperparams: Mapping[str, Any]) -> None:
        """Compile what is not compiled yet, and check that the evaluation has the metric of `best`."""
        with self.signals.killable():
            heartbeat(self.current_step, Phase.COMPILING)
            self.step.start_compile(self.state, batch, **hyperparams)
            try:
                self.monitor.print_layers(self.state.trainables)
                self.scoring.prepare(self.state)  # which compiles, too
            except BaseException:
                self.step.wait()
                raise
            self.step.compile(self.state, batch, **hyperparams)

    def _read(self, records: list[Record]) -> None:
        """Take note of the metrics of steps that are done, and roll back if too many were not finite."""
        if records:
            self.metrics = {name: value for name, value in records[-1].items() if name != "step"}
        if self.divergence.count(records):
            heartbeat(self.current_step, Phase.CALLBACK)  # to find the layer may take long
            self.state = self.divergence.roll_back(self.state, self._find_nonfinite)

    def _find_nonfinite(self) -> NonFinite | None:
        """The layer of the first NaN in the last call of the step, which left the weights as they were."""
        step = self.step
        _, compiled = (step.aot if step.aot.compiled else step.overriding_aot).stages()
        free = free_bytes(jax.local_devices()[0])
        analysis: Any = compiled.memory_analysis()
        if free is not None and UNFUSED * analysis.temp_size_in_bytes > free:
            return None
        before = self.state._replace(step=self.state.step - step.steps_per_call)
        return step.nonfinite(before, self.batch)

    def _is_last(self) -> bool:
        return self.current_step >= self.intervals.steps

    def _evaluation_is_due(self) -> bool:
        return bool(self.scoring.feeds) and (self._is_last() or self.current_step % self.intervals.evaluate_every == 0)

    def _evaluate(self) -> bool:
        """Evaluate, unless a signal ends it; returns whether the scores are the best so far."""
        heartbeat(self.current_step, Phase.EVALUATION)
        scores = self.scoring.evaluate(self.current_step, self.state, self.signals.pending, self._until_signal)
        if scores is None:
            return False
        self.monitor.log_evaluation(self.current_step, scores, prefix=self.scoring.prefix)
        is_best = self.scoring.count()
        if self.scoring.out_of_patience():
            self._stop_early(self.scoring.reason(), patience=True)
        return is_best

    def _stop_early(self, reason: str, *, patience: bool) -> None:
        if not self._is_last():
            self.stop = EarlyStop(reason, self.intervals.steps, patience)

    def _until_signal(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            heartbeat(self.current_step, Phase.EVALUATION)
            if self.signals.poll_all():
                return

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        with self.signals.unkillable():
            heartbeat(self.current_step, Phase.SAVING)
            stable = self.divergence.update_stable(self.current_step)
            self.checkpoints.save(
                self.current_step,
                self.state,
                # weights that were not evaluated cannot be the best
                metrics=self.scoring.finite_scores() if self.scoring.step == self.current_step else {},
                notes={
                    **self.scoring.notes(),
                    "metrics": {name: value if math.isfinite(value) else None for name, value in self.metrics.items()},
                    "owes_callback": self.owes_callback,
                    "stop": self.stop,
                    "feed": self.position(),
                    "stable": stable,
                },
                also_keep=() if stable is None else (stable.step,),
            )
            if failure := self.checkpoints.failure():
                self.scoring.forget_saved()
                self.monitor.warn(f"a save failed, and training continues: {failure}")
        self.saved_step = self.current_step
