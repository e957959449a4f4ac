"""fit: the training loop."""

import html
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from mlax._compilation_cache import CompilationCache, start_compilation_cache
from mlax.core import check_not_donated, document_tuple, print_pretty, short_summary, tabulate
from mlax.train._callback import Callback, Each, check_callback
from mlax.train._checks import int_at_least
from mlax.train._divergence import Divergence
from mlax.train._fingerprint import fingerprint
from mlax.train._loggers import Logger, check_loggers
from mlax.train._loop import Intervals, Loop
from mlax.train._monitor import Monitor, describe_run, format_values, notebook_shell
from mlax.train._profile import Profile, check_window
from mlax.train._run import (
    Resume,
    RunFolder,
    check_config,
    command,
    compare_config,
    configuration,
    delete_leaves,
    export_weights,
    open_checkpoints,
    public_config,
    restore_latest,
    trim_log,
    write_html_report,
)
from mlax.train._scoring import Scoring, check_feed, check_feeds, check_patience, score_name
from mlax.train._signals import Signals, exit_status
from mlax.train._state import DONATED_STATE, TrainState
from mlax.train._step import Step
from mlax.train.checkpoints._checkpoints import Checkpoints, Maximize, Minimize


@document_tuple
class Fitted(NamedTuple):
    """The trained state, its scores, and how far training got: what `fit` returns.

    `state` has the last weights. `best_state()` restores those of the best evaluation, which early stopping is for.
    """

    state: TrainState  # after the last step
    scores: Mapping[str, float]  # of the last evaluation
    step: int  # how far training got
    saved: int | None  # the last step on disk
    stopped: str  # why training ended early: a signal, the reason of `each`, or patience; else an empty string
    best: int | None = None  # the step of the best evaluation
    checkpoints: Checkpoints | None = None  # of the run, if it has a folder

    def best_state(self) -> TrainState:
        """The state of the best evaluation, restored from its checkpoint."""
        number = None if self.checkpoints is None or self.best is None else self.checkpoints.best()
        if self.checkpoints is None or number is None:
            lacking = "run=" if self.checkpoints is None else "evaluate="
            raise ValueError(f"best_state: no best state was saved; pass {lacking} to fit, which saves one.")
        return self.checkpoints.restore(self.state, step=number).tree

    def __repr__(self) -> str:
        return f"Fitted({self._summary()}; {short_summary(self.state)})"

    def __str__(self) -> str:
        return f"Fitted: {self._summary()}\n{self.state}"

    def _repr_html_(self) -> str:
        return f"<div>{html.escape(f'Fitted: {self._summary()}')}</div>{tabulate(self.state)._repr_html_()}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        print_pretty(self, printer)

    def _summary(self) -> str:
        words = f"step {self.step:,}" + f", ended early ({self.stopped})" * bool(self.stopped)
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
    best: Maximize | Minimize | None = None,
    patience: int | None = None,
    save_every: int | None = None,
    keep: int = 3,
    resume: Resume = True,
    rollbacks: int = 2,
    hyperparams: Callable[[int], Mapping[str, Any]] | None = None,
    each: Each | None = None,
    each_every: int = 50,
    loggers: Sequence[Logger] = (),
    profile: tuple[int, int] | None = None,
    grace: float | None = None,
    config: Any = None,
    show: bool = True,
) -> Fitted:
    """The training loop: train up to step number `steps`, resuming from the last checkpoint in the folder `run`.

    The folder also gets the configuration, metrics, curves, reports of the run and of the compiled step, and the last
    and best weights. `state` is donated: use the one in the result, or `result.best_state()`.

    evaluate        a feed to evaluate with, or several by name: {"valid": feed, ...} gives scores like "valid/loss"
    evaluate_every  steps; by default an epoch
    best            the score of the best weights; by default Minimize("loss"), of the first feed
    patience        early stopping: end after so many evaluations in a row that do not improve `best`, whose weights
                    are kept in the folder `run` only
    save_every      steps between checkpoints, by default `evaluate_every`; also the best and the last state are saved
    keep            how many of the last checkpoints to keep, besides the best one
    resume          True: only the same experiment; False: refuse to resume; "anyway": also a changed experiment, or one
                    that ended early; "restart": move the run in the folder aside and start over
    rollbacks       how often to restore an earlier checkpoint after 20 non-finite steps in a row
    hyperparams     a function of the number of steps so far: the hyperparameters to override, {"rate": 3e-4} say
    each            a callback each(step, state, metrics, scores), called every `each_every` steps and after each
                    evaluation. Returns True or a reason to stop. The next step donates its state: copy what you keep.
    loggers         train.TensorBoard(), train.WandB(project), train.JSONLines(path), or a train.Logger of yours
    profile         (first, last): trace these steps into the folder "profile" of the run, for Perfetto
    grace           seconds in which to exit after SIGTERM, except during a save or `each`; 8, or 28 on a cluster
    config          values to add to the configuration of the run, such as a dataclass or dict
    show            whether to print the configuration and progress

    Compiled programs are kept in a cache, so that the next run starts faster: see `train.enable_compilation_cache`.
    SIGTERM and SIGHUP save and exit; Ctrl-C saves and returns. A run that `each` or `patience` ended stays as it is if
    it is resumed, and continues with more `steps` or `patience`. Guide: docs/guides/training-loop.md.
    """
    _check_arguments(step, state, feed, best, resume, grace)
    step.check_constants("fit")
    feeds = check_feeds(evaluate)
    check_callback(each)
    steps = _check_steps(step, "steps", steps)
    evaluate_every = _check_steps(
        step, "evaluate_every", _steps_per_epoch(step, feed, steps) if evaluate_every is None else evaluate_every
    )
    save_every = _check_steps(step, "save_every", evaluate_every if save_every is None else save_every)
    rollbacks = int_at_least(0, rollbacks, "fit: rollbacks")
    each_every = int_at_least(1, each_every, "fit: each_every")
    best = _check_best(best, feeds)
    patience = check_patience(patience, best)
    window, loggers = check_window(profile), check_loggers(loggers)
    cache = _start_cache()
    with RunFolder(run) as run_folder, Signals(grace) as signals:
        if resume == "restart":
            check_not_donated("fit", DONATED_STATE, state=state)  # before anything is moved
        moved = run_folder.move_aside() if resume == "restart" else ""
        checkpoints = open_checkpoints(run_folder, keep, best, resume)
        if checkpoints is None or checkpoints.latest() is None:  # to restore one, the shapes of the state are enough
            check_not_donated("fit", DONATED_STATE, state=state)
        run_config = configuration(
            step=repr(step),
            feed=repr(feed),
            evaluate=_describe_feeds(feeds),
            best=None if best is None else repr(best),
            patience=patience,
            steps=steps,
            config=config,
            fingerprint={} if run is None else fingerprint(step.objective, state, feed, feeds),
        )
        changes = compare_config(run_folder, run_config)
        if checkpoints is not None and (latest := checkpoints.latest()) is not None:
            check_config(run_folder, changes, latest, steps, resume)  # before anything is restored
        initial = state
        current_step, state, notes = restore_latest(run_folder, checkpoints, initial)
        if notes and changes.refused:  # the scores of another experiment, resumed anyway, are not those of this one
            notes = {**notes, "scored": None, "stable": None}
        monitor = Monitor(
            run_folder, step, feed, current_step, steps, loggers=loggers, config=public_config(run_config), show=show
        )
        monitor.print(describe_run(run_folder, run_config, state.trainables, current_step, cache.folder))
        if cache.problem:
            monitor.print(f"compiled programs are not cached: {cache.problem}")
        for warning in (moved, *changes.warnings(resumed=bool(notes)), trim_log(run_folder, current_step)):
            monitor.warn(warning)
        if patience is not None and run is None:
            monitor.warn("patience: the best weights are not kept without a run folder; pass run= to get them back.")
        loop = Loop(
            step=step,
            state=state,
            scoring=Scoring(step.evaluation, feeds, best, patience, notes),
            callback=None if each is None else Callback(each, each_every),
            checkpoints=checkpoints,
            monitor=monitor,
            profile=Profile(window if run_folder.is_main else None, run_folder.path("profile"), monitor.warn),
            divergence=Divergence(
                feed,
                checkpoints,
                monitor,
                rollbacks=rollbacks,
                saved=current_step if notes else None,
                stable=notes.get("stable"),
            ),
            signals=signals,
            hyperparams=hyperparams,
            intervals=Intervals(steps, evaluate_every, save_every),
            current_step=current_step,
            notes=notes,
        )
        loop.reconsider_stop(resume)
        if loop.stop is not None:
            check_config(run_folder, changes, current_step, steps, resume, finished=True)
        if notes:
            delete_leaves(initial)
        if loop.is_complete():
            monitor.print(_restored_message(run_folder, loop))
            return _result(loop, loop.last_on_disk(), "")
        run_folder.write_config(run_config)
        with monitor, loop.profile:
            _train(loop, feed, notes)
            interrupted = "" if loop.is_complete() else signals.pending()
            saved = loop.last_on_disk()
            monitor.print(_closing_message(run_folder, loop, interrupted))
        export_weights(run_folder, step.optimizer, loop.state, checkpoints, monitor.warn)
        run_folder.update_curves(last=not interrupted)
        run_folder.write_report(str(run_folder.root), {**loop.summary(), **run_config})
        if not interrupted:
            write_html_report(run_folder, step, loop.state, monitor.warn)
    if interrupted in ("SIGTERM", "SIGHUP"):
        sys.exit(exit_status(interrupted))
    return _result(loop, saved, interrupted)


def _start_cache() -> CompilationCache:
    """The persistent compilation cache, on by default in a single process.

    Among several, only the first would write programs: where they do not share the folder, it would read a program
    while the others compile it, and XLA's autotuning, which they divide among them, would wait for it forever.
    """
    if jax.process_count() > 1:
        return CompilationCache(jax.config.jax_compilation_cache_dir)  # pyright: ignore[reportAttributeAccessIssue]
    return start_compilation_cache()


def _train(loop: Loop, feed: Any, notes: Mapping[str, Any]) -> None:
    """Train to the end, from the checkpoint with these notes, if there is one, or until something stops it."""
    if notes:
        loop.catch_up()
    if loop.can_train():
        stream = feed.stream(
            loop.current_step,
            loop.intervals.steps,
            steps_per_call=loop.step.steps_per_call,
            stopped=loop.signals.pending,
            position=notes.get("feed"),
        )
        with stream as batches:
            loop.train(batches)
    loop.signals.acknowledge()  # what follows ends by itself


def _result(loop: Loop, saved: int | None, interrupted: str) -> Fitted:
    stopped = interrupted or ("" if loop.stop is None else loop.stop.reason)
    scoring = loop.scoring
    return Fitted(loop.state, scoring.scores, loop.current_step, saved, stopped, scoring.best.step, loop.checkpoints)


def _restored_message(run: RunFolder, loop: Loop) -> str:
    if loop.stop is not None:
        return _closing_message(run, loop, "")
    return (
        f"already trained: {run.root} holds step {loop.current_step} of {loop.intervals.steps}, which fit returns; "
        f'pass more steps to continue, or resume="restart" to start over  {format_values(loop.scoring.scores)}'
    )


def _closing_message(run: RunFolder, loop: Loop, interrupted: str) -> str:
    steps, skipped = loop.intervals.steps, int(loop.state.skipped)
    if interrupted:
        at = "in the evaluation after" if loop.lacks_scores() else "after"
        message = f"stopped by {interrupted} {at} step {loop.current_step} of {steps}"
        if run.root is None:
            return f"{message}; nothing was saved, since there is no run folder"
        return f"{message}; {_resume_advice()}"
    counted = f", {skipped} of them skipped, as they were not finite" if skipped else ""
    where = "" if run.root is None else f"\nreport, curves and weights are in {run.root}"
    reached = f"{loop.current_step} of {steps} steps{counted}"
    if loop.stop is None:
        return f"finished: {reached}  {format_values(loop.scoring.scores)}{where}"
    message = f"ended early: {reached}: {loop.stop.reason}"
    if run.root is None:
        return message
    more = "more steps or patience" if loop.stop.patience else "more steps"
    return f'{message}; it continues with {more}, or resume="anyway"{where}'


def _resume_advice() -> str:
    return "run the cell again to resume" if notebook_shell() is not None else f"resume with: {command()}"


def _steps_per_epoch(step: Step, feed: Any, steps: int) -> int:
    """The steps of an epoch, or a tenth of all steps where that is unknown, rounded up to whole calls."""
    return -(-(feed.steps or -(-steps // 10)) // step.steps_per_call) * step.steps_per_call


def _check_arguments(step: Any, state: Any, feed: Any, best: Any, resume: Any, grace: Any) -> None:
    if not isinstance(step, Step):
        raise TypeError(f"fit: step is a {type(step).__name__}; make it by train.step(objective, optimizer).")
    if not isinstance(state, TrainState):
        raise TypeError(f"fit: state is a {type(state).__name__}; make it by step.init(rng, *model.init(...)).")
    check_feed("feed", feed)
    if grace is not None and (not isinstance(grace, int | float) or isinstance(grace, bool) or not grace >= 0):
        raise ValueError(f"fit: grace is {grace!r}, but must be a number of seconds, or None.")
    if not isinstance(resume, bool) and resume not in ("anyway", "restart"):
        raise ValueError(f'fit: resume is {resume!r}, but must be True, False, "anyway" or "restart".')


def _check_best(best: Any, feeds: Mapping[str, Any]) -> Maximize | Minimize | None:
    """The criterion of the best weights, by default the loss of the first feed."""
    if best is not None and not isinstance(best, Maximize | Minimize):
        name = best if isinstance(best, str) else "accuracy"
        raise TypeError(
            f"fit: best is {best!r}; write train.Maximize({name!r}), or train.Minimize({name!r}) if less is better."
        )
    if best is not None and not feeds:
        raise TypeError(f"fit: best={best!r} is a score of an evaluation; pass evaluate=feed as well.")
    return best or (Minimize(score_name(next(iter(feeds)), "loss")) if feeds else None)


def _describe_feeds(feeds: Mapping[str, Any]) -> str | dict[str, str] | None:
    if not feeds:
        return None
    return repr(feeds[""]) if "" in feeds else {name: repr(feed) for name, feed in feeds.items()}


def _check_steps(step: Step, name: str, value: Any) -> int:
    number = int_at_least(1, value, f"fit: {name}")
    if number % step.steps_per_call:
        raise ValueError(
            f"fit: {name} is {number}, but must be a multiple of the {step.steps_per_call} steps per call."
        )
    return number
