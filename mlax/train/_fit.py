"""fit: the training loop."""

import dataclasses
import html
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mlax._supervision import Phase
from mlax.core import NoMatch, check_not_donated, print_pretty, short_summary, tabulate
from mlax.train._checks import int_at_least
from mlax.train._divergence import Divergence
from mlax.train._fingerprint import fingerprint
from mlax.train._metrics import Record
from mlax.train._monitor import Monitor, describe_run, format_values
from mlax.train._run import (
    Resume,
    RunFolder,
    check_config,
    command,
    compare_config,
    configuration,
    export_weights,
    open_checkpoints,
    restore_latest,
    trim_log,
)
from mlax.train._signals import Signals, exit_status, heartbeat
from mlax.train._state import DONATED_STATE, TrainState
from mlax.train._step import Step
from mlax.train.checkpoints._checkpoints import Checkpoints, Maximize, Minimize


class Fitted(NamedTuple):
    """The trained state, its scores, and how far training got: what `fit` returns."""

    state: TrainState
    scores: Mapping[str, float]  # of the last evaluation
    step: int
    saved: int | None  # the last step on disk
    stopped: str  # the signal that stopped training early, or an empty string

    def __repr__(self) -> str:
        return f"Fitted({self._summary()}; {short_summary(self.state)})"

    def __str__(self) -> str:
        return f"Fitted: {self._summary()}\n{self.state}"

    def _repr_html_(self) -> str:
        return f"<div>{html.escape(f'Fitted: {self._summary()}')}</div>{tabulate(self.state)._repr_html_()}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        print_pretty(self, printer)

    def _summary(self) -> str:
        words = f"step {self.step:,}" + f", stopped by {self.stopped}" * bool(self.stopped)
        saved = "not saved" if self.saved is None else f"saved up to step {self.saved:,}"
        return ", ".join([words, saved, *(f"{name} {value:.4g}" for name, value in self.scores.items())])


def fit(
    step: Step,
    state: TrainState,
    feed: Any,
    *,
    steps: int,
    run: str | os.PathLike[str] | None = None,
    evaluate: Any = None,
    evaluate_every: int | None = None,
    save_every: int | None = None,
    keep: int = 3,
    best: Maximize | Minimize | None = None,
    resume: Resume = True,
    rollbacks: int = 2,
    hyperparams: Callable[[int], Mapping[str, Any]] | None = None,
    grace: float | None = None,
    config: Any = None,
    tensorboard: bool = False,
    show: bool = True,
) -> Fitted:
    """Train up to step number `steps`, resuming from the last checkpoint in the folder `run`, if there is one.

    `evaluate` is a feed to evaluate with every `evaluate_every` steps, by default once per epoch. Checkpoints are saved
    every `save_every` steps, by default as often, after each evaluation that is the best so far, and at the end; also
    on SIGTERM and SIGHUP, after which the process exits, and on Ctrl-C, after which `fit` returns. The last `keep`
    checkpoints are kept, and the `best` one, by default the one with the lowest loss. After 20 non-finite steps in a
    row the weights of an earlier checkpoint are restored, at most `rollbacks` times. The folder also holds the
    configuration, to which `config` is added, the metrics, their curves, a report and the weights. `state` is donated:
    use the one in the result.

    hyperparams
            a function of the number of steps so far, called before each call of the step, which returns those to
            override, `{"rate": 3e-4}` say, always of the same names. It may read a file that you edit.
    resume  A run is resumed only by the same experiment. Other data, another objective, model or key are refused with
            a list of the differences; another optimizer or batch size is reported. "anyway" resumes all the same,
            "restart" moves the run in the folder aside and starts over, each time that the program runs; False
            refuses to resume.
    grace   seconds after SIGTERM within which the process exits if it is busy with anything but a save. None: 8, or
            28 under Slurm and Kubernetes, or until the time limit of a Slurm job that is near. `mlax launch` has its
            own.
    """
    _check_arguments(step, state, feed, evaluate, best, resume, grace)
    steps = _check_steps(step, "steps", steps)
    evaluate_every = _check_steps(
        step, "evaluate_every", _steps_per_epoch(step, feed, steps) if evaluate_every is None else evaluate_every
    )
    save_every = _check_steps(step, "save_every", evaluate_every if save_every is None else save_every)
    rollbacks = int_at_least(0, rollbacks, "fit: rollbacks")
    best = best or (Minimize("loss") if evaluate is not None else None)
    with RunFolder(run) as run_folder, Signals(grace) as signals:
        moved = run_folder.move_aside() if resume == "restart" else ""
        checkpoints = open_checkpoints(run_folder, keep, best, resume)
        run_config = configuration(
            step=repr(step),
            feed=repr(feed),
            evaluate=None if evaluate is None else repr(evaluate),
            best=None if best is None else repr(best),
            steps=steps,
            config=config,
            fingerprint={} if run is None else fingerprint(step.objective, state, feed, evaluate),
        )
        changes = compare_config(run_folder, run_config)
        if checkpoints is not None and (latest := checkpoints.latest()) is not None:
            check_config(run_folder, changes, latest, steps, resume)  # before the state is deleted
        current_step, state, notes = restore_latest(run_folder, checkpoints, state)
        monitor = Monitor(run_folder, step, feed, current_step, steps, tensorboard=tensorboard, show=show)
        monitor.print(describe_run(run_folder, run_config, state.trainables, current_step))
        for warning in (moved, *changes.warnings(resumed=bool(notes)), trim_log(run_folder, current_step)):
            monitor.warn(warning)
        loop = Loop(
            step=step,
            state=state,
            evaluate=evaluate,
            checkpoints=checkpoints,
            best=best,
            monitor=monitor,
            divergence=Divergence(
                feed,
                checkpoints,
                monitor,
                rollbacks=rollbacks,
                saved=current_step if notes else None,
                stable=None if changes.refused else notes.get("stable"),
            ),
            signals=signals,
            hyperparams=hyperparams,
            intervals=Intervals(steps, evaluate_every, save_every),
            current_step=current_step,
            # the scores of another experiment, resumed anyway, are not those of this one
            notes={**notes, "scored": None} if changes.refused else notes,
        )
        if current_step >= steps and not loop.lacks_scores():
            monitor.print(_closing_message(run_folder, loop, ""))
            return Fitted(loop.state, loop.scores, current_step, loop.last_on_disk(), "")
        run_folder.write_config(run_config)
        with monitor:
            if notes and loop.lacks_scores():
                loop.repeat_evaluation()
            if current_step < steps:
                stream = feed.stream(
                    current_step,
                    steps,
                    steps_per_call=step.steps_per_call,
                    stopped=signals.pending,
                    position=notes.get("feed"),
                )
                with stream as batches:
                    loop.train(batches)
            signals.acknowledge()  # what follows ends by itself
            stopped = signals.pending() if loop.current_step < steps or loop.lacks_scores() else ""
            saved = loop.last_on_disk()
            monitor.print(_closing_message(run_folder, loop, stopped))
        export_weights(run_folder, step.optimizer, loop.state, checkpoints, monitor.warn)
        run_folder.update_curves(last=not stopped)
        run_folder.write_report(str(run_folder.root), {**loop.summary(), **run_config})
    if stopped in ("SIGTERM", "SIGHUP"):
        sys.exit(exit_status(stopped))
    return Fitted(loop.state, loop.scores, loop.current_step, saved, stopped)


class Intervals(NamedTuple):
    """How many steps there are in all, between two evaluations, and between two checkpoints."""

    steps: int
    evaluate_every: int
    save_every: int


@dataclasses.dataclass(kw_only=True)
class Loop:
    """A run in progress: its state, the step that it has reached, the last scores, and what is saved."""

    step: Step
    state: TrainState
    evaluate: Any  # a feed, or None
    checkpoints: Checkpoints | None
    best: Maximize | Minimize | None
    monitor: Monitor
    divergence: Divergence
    signals: Signals
    hyperparams: Callable[[int], Mapping[str, Any]] | None
    intervals: Intervals
    current_step: int
    notes: dataclasses.InitVar[Mapping[str, Any]]  # of the checkpoint that training resumes from

    def __post_init__(self, notes: Mapping[str, Any]):
        self.saved_step = self.current_step
        self.scores: Mapping[str, float] = notes.get("scores", {})
        self.scored_step: int | None = notes.get("scored")  # the step of these scores
        # the best of all evaluations so far, and by what it is
        self.best_score: float | None = notes.get("best", {}).get(repr(self.best))
        self.position: Callable[[], Any] = lambda: notes.get("feed")  # in the data

    def train(self, batches: Any) -> None:
        """Train on all batches, or until a signal arrives; evaluate and save where that is due, and at the end."""
        self.position = batches.position
        prepared = False
        for batch in batches:
            hyperparams = {} if self.hyperparams is None else self.hyperparams(self.current_step)
            if not prepared:  # even if the step was compiled before, `best` and the evaluation are new
                self._prepare(batch, hyperparams)
                prepared = True
            heartbeat(self.current_step, Phase.STEP)
            self.state, metrics = self.step(self.state, batch, **hyperparams)
            self.current_step += self.step.steps_per_call
            heartbeat(self.current_step, Phase.AFTER_STEP)
            ending = self.current_step >= self.intervals.steps or bool(self.signals.poll_all())
            evaluating = self._evaluation_is_due()
            saving = ending or self.current_step % self.intervals.save_every == 0
            self._check_divergence(self.monitor.log_metrics(self.current_step, metrics, wait=evaluating or saving))
            if evaluating and not self.signals.pending():
                saving = self._evaluate() or saving
            # amid skipped steps only the last one is saved, since retention might delete the checkpoint before them
            if ending or (saving and not self.divergence.skipped):
                self._save()
            if ending or self.signals.pending():
                break
            heartbeat(self.current_step, Phase.WAITING_FOR_DATA)
        self._check_divergence(self.monitor.log_rest())  # a signal may have ended the wait for data
        if self.current_step > self.saved_step:
            self._save()
        heartbeat(self.current_step, Phase.ENDING)

    def lacks_scores(self) -> bool:
        """Whether the present step is to be evaluated, and was not: a signal may have ended the evaluation."""
        return self._evaluation_is_due() and self.scored_step != self.current_step

    def repeat_evaluation(self) -> None:
        """Evaluate the checkpoint that training resumes from, and save it again with its scores."""
        with self.signals.killable():
            heartbeat(self.current_step, Phase.COMPILING)
            _check_best_metric(self.best, self.step.evaluation.prepare(self.state, self.evaluate))
        self._evaluate()
        if not self.lacks_scores():
            self._save()

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
        """How far training got, how many of its steps were skipped, and the last scores."""
        skipped = int(self.state.skipped)
        scored = {} if self.scored_step in (None, self.current_step) else {"evaluated": f"step {self.scored_step:,}"}
        return {
            "reached": f"step {self.current_step:,} of {self.intervals.steps:,}",
            **({"skipped": f"{skipped:,} steps, which were not finite"} if skipped else {}),
            **scored,
            **self.scores,
        }

    def _prepare(self, batch: Any, hyperparams: Mapping[str, Any]) -> None:
        """Compile what is not compiled yet, and check that the evaluation has the metric of `best`."""
        with self.signals.killable():
            heartbeat(self.current_step, Phase.COMPILING)
            self.step.compile(self.state, batch, **hyperparams)
            if self.evaluate is not None:
                _check_best_metric(self.best, self.step.evaluation.prepare(self.state, self.evaluate))

    def _check_divergence(self, records: list[Record]) -> None:
        if self.divergence.count(records):
            self.state = self.divergence.roll_back(self.state)

    def _evaluation_is_due(self) -> bool:
        last = self.current_step >= self.intervals.steps
        return self.evaluate is not None and (last or self.current_step % self.intervals.evaluate_every == 0)

    def _evaluate(self) -> bool:
        """Evaluate, unless a signal ends it; returns whether the scores are the best so far."""
        heartbeat(self.current_step, Phase.EVALUATION)
        with self.evaluate.epoch(stopped=self.signals.pending) as batches:
            values = self.step.evaluation(self.state, self._until_signal(batches))
        scores = {name: value for name, value in values.items() if isinstance(value, float)}  # no confusion matrix
        if self.signals.pending():
            return False
        self.scores, self.scored_step = scores, self.current_step
        self.monitor.log_evaluation(self.current_step, scores)
        score = math.nan if self.best is None else scores[self.best.metric]
        if self.best is None or not math.isfinite(score):
            return False
        candidates = {} if self.best_score is None else {0: {self.best.metric: self.best_score}}
        if self.best.best_step({**candidates, 1: {self.best.metric: score}}) == 1:
            self.best_score = score
            return True
        return False

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
            finite = {name: value for name, value in self.scores.items() if math.isfinite(value)}
            stable = self.divergence.update_stable(self.current_step)
            self.checkpoints.save(
                self.current_step,
                self.state,
                # weights that were not evaluated cannot be the best
                metrics=finite if self.scored_step == self.current_step else {},
                notes={
                    "scores": finite,
                    "scored": self.scored_step,
                    "best": {} if self.best_score is None else {repr(self.best): self.best_score},
                    "feed": self.position(),
                    "stable": stable,
                },
                also_keep=() if stable is None else (stable.step,),
            )
            if failure := self.checkpoints.failure():
                self.best_score = None  # the best weights may not be on disk
                self.monitor.warn(f"a save failed, and training continues: {failure}")
        self.saved_step = self.current_step


def _closing_message(run: RunFolder, loop: Loop, stopped: str) -> str:
    steps, skipped = loop.intervals.steps, int(loop.state.skipped)
    if not stopped:
        where = "" if run.root is None else f"\nreport, curves and weights are in {run.root}"
        counted = f", {skipped} of them skipped, as they were not finite" if skipped else ""
        return f"finished: {loop.current_step} of {steps} steps{counted}  {format_values(loop.scores)}{where}"
    at = "in the evaluation after" if loop.lacks_scores() else "after"
    message = f"stopped by {stopped} {at} step {loop.current_step} of {steps}"
    if run.root is None:
        return f"{message}; nothing was saved, since there is no run folder"
    return f"{message}; resume with: {command()}"


def _steps_per_epoch(step: Step, feed: Any, steps: int) -> int:
    """The steps of an epoch, or a tenth of all steps where that is unknown, rounded up to whole calls."""
    return -(-(feed.steps or -(-steps // 10)) // step.steps_per_call) * step.steps_per_call


def _check_arguments(step: Any, state: Any, feed: Any, evaluate: Any, best: Any, resume: Any, grace: Any) -> None:
    if not isinstance(step, Step):
        raise TypeError(f"fit: step is a {type(step).__name__}; make it by train.step(objective, optimizer).")
    if not isinstance(state, TrainState):
        raise TypeError(f"fit: state is a {type(state).__name__}; make it by step.init(rng, *model.init(...)).")
    check_not_donated("fit", DONATED_STATE, state=state)
    for name, value in (("feed", feed), ("evaluate", evaluate)):
        if not hasattr(value, "stream") and not (name == "evaluate" and value is None):
            raise TypeError(
                f"fit: {name} is a {type(value).__name__}, but must be a feed: train.Feed(arrays, batch), or "
                "train.IterableFeed(make) for batches from an iterator, where make() returns the iterator."
            )
    if best is not None and (evaluate is None or not isinstance(best, Maximize | Minimize)):
        raise TypeError("fit: best needs evaluate=feed, and is train.Maximize('accuracy') or train.Minimize('loss').")
    if grace is not None and (not isinstance(grace, int | float) or isinstance(grace, bool) or not grace >= 0):
        raise ValueError(f"fit: grace is {grace!r}, but must be a number of seconds, or None.")
    if not isinstance(resume, bool) and resume not in ("anyway", "restart"):
        raise ValueError(f'fit: resume is {resume!r}, but must be True, False, "anyway" or "restart".')


def _check_best_metric(best: Maximize | Minimize | None, names: tuple[str, ...]) -> None:
    if best is not None and best.metric not in names:
        raise NoMatch(f"fit: best is {best}, but the objective returns {', '.join(names)}.")


def _check_steps(step: Step, name: str, value: Any) -> int:
    number = int_at_least(1, value, f"fit: {name}")
    if number % step.steps_per_call:
        raise ValueError(
            f"fit: {name} is {number}, but must be a multiple of the {step.steps_per_call} steps per call."
        )
    return number
