"""fit: the training loop."""

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jax import random

from mlax._supervision import TERMINATED, Phase
from mlax.core import NoMatch
from mlax.train._divergence import Divergence
from mlax.train._monitor import Monitor, describe_run, format_values
from mlax.train._run import (
    RunFolder,
    command,
    configuration,
    export_weights,
    open_checkpoints,
    record_config,
    restore_latest,
)
from mlax.train._signals import Signals, heartbeat
from mlax.train._state import TrainState
from mlax.train._step import Step
from mlax.train.checkpoints._checkpoints import Checkpoints, Maximize, Minimize


class Fitted(NamedTuple):
    """The trained state, its scores, and how far training got: what `fit` returns."""

    state: TrainState
    scores: Mapping[str, float]  # of the last evaluation
    step: int
    saved: int | None  # the last step on disk
    stopped: str  # the signal that stopped training early, or an empty string


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
    resume: bool = True,
    rollbacks: int = 2,
    config: Any = None,
    tensorboard: bool = False,
    show: bool = True,
) -> Fitted:
    """Train up to step number `steps`, resuming from the last checkpoint in the folder `run`, if there is one.

    `evaluate` is a feed to evaluate with every `evaluate_every` steps, by default once per epoch. Checkpoints are saved
    every `save_every` steps, by default as often, and at the end; also on SIGTERM, after which the process exits, and
    on Ctrl-C, after which `fit` returns. The last `keep` checkpoints are kept, and the `best` one, by default the one
    with the lowest loss. After 20 non-finite steps in a row the weights of an earlier checkpoint are restored, at most
    `rollbacks` times. The folder also holds the configuration, to which `config` is added, the metrics, their curves, a
    report and the weights. `state` is donated: use the one in the result.
    """
    _check_arguments(step, state, feed, evaluate, best)
    evaluate_every = _steps_per_epoch(step, feed, steps) if evaluate_every is None else evaluate_every
    save_every = evaluate_every if save_every is None else save_every
    _check_steps(step, steps=steps, evaluate_every=evaluate_every, save_every=save_every)
    best = best or (Minimize("loss") if evaluate is not None else None)
    with RunFolder(run) as run_folder, Signals() as signals:
        checkpoints = open_checkpoints(run_folder, keep, best, resume)
        current_step, state, notes = restore_latest(run_folder, checkpoints, state)
        last_saved_step = last_scored_step = current_step
        scores = notes.get("scores", {})
        run_config = configuration(
            step=repr(step),
            feed=repr(feed),
            evaluate=None if evaluate is None else repr(evaluate),
            steps=steps,
            config=config,
            seed=f"{random.key_impl(state.rng)} {random.key_data(state.rng).tolist()}",
        )
        changes = record_config(run_folder, run_config, current_step, steps)
        monitor = Monitor(run_folder, step, feed, current_step, steps, tensorboard=tensorboard, show=show)
        divergence = Divergence(feed, checkpoints, monitor, rollbacks=rollbacks)
        monitor.print(describe_run(run_folder, run_config, changes, state.trainables, current_step))
        if current_step >= steps:
            monitor.print(_closing_message(run_folder, current_step, steps, scores, ""))
            return Fitted(state, scores, current_step, checkpoints.latest() if checkpoints is not None else None, "")

        def save() -> int:
            if checkpoints is not None and current_step > last_saved_step:
                heartbeat(current_step, Phase.SAVING)
                finite = {name: value for name, value in scores.items() if math.isfinite(value)}
                # weights that were not evaluated cannot be the best
                metrics = finite if last_scored_step == current_step else {}
                notes = {"scores": finite, "feed": batches.position()}
                checkpoints.save(current_step, state, metrics=metrics, notes=notes)
                if failure := checkpoints.failure():
                    monitor.print(f"a save failed, and training continues: {failure}")
            return current_step

        def until_signal(batches: Iterable[Any]) -> Iterator[Any]:
            for batch in batches:
                yield batch
                heartbeat(current_step, Phase.EVALUATION)
                if signals.poll_all():
                    return

        stream = feed.stream(
            current_step, steps, steps_per_call=step.steps_per_call, stopped=signals.pending, position=notes.get("feed")
        )
        with monitor, stream as batches:
            for batch in batches:
                if not step.aot.compiled:
                    with signals.killable():
                        heartbeat(current_step, Phase.COMPILING)
                        step.aot.compile(state, batch)
                        if evaluate is not None:
                            _check_best_metric(best, step.evaluation.prepare(state, evaluate))
                heartbeat(current_step, Phase.STEP)
                state, metrics = step(state, batch)
                current_step += step.steps_per_call
                heartbeat(current_step, Phase.AFTER_STEP)
                ending = current_step >= steps or bool(signals.poll_all())
                evaluating = evaluate is not None and (current_step % evaluate_every == 0 or current_step >= steps)
                saving = ending or (checkpoints is not None and current_step % save_every == 0)
                records = monitor.log_metrics(current_step, metrics, wait=evaluating or saving)
                if divergence.count(records):
                    state = divergence.roll_back(state)
                if evaluate is not None and evaluating and not signals.pending():
                    heartbeat(current_step, Phase.EVALUATION)
                    with evaluate.epoch(stopped=signals.pending) as test:
                        found = step.evaluation(state, until_signal(test))
                    if not signals.pending():
                        scores, last_scored_step = found, current_step
                        monitor.log_evaluation(current_step, scores)
                # amid skipped steps only the last one is saved, since retention might delete the checkpoint before them
                if ending or (saving and not divergence.skipped):
                    last_saved_step = save()
                if ending or signals.pending():
                    break
                heartbeat(current_step, Phase.WAITING_FOR_DATA)
            signals.acknowledge()
            save()
            heartbeat(current_step, Phase.ENDING)
            saved = _wait_for_saves(checkpoints, monitor)
            stopped = signals.pending() if current_step < steps else ""
            monitor.print(_closing_message(run_folder, current_step, steps, scores, stopped))
        export_weights(run_folder, step.optimizer, state, checkpoints, monitor.print)
        run_folder.update_curves(last=not stopped)
        reached = f"step {current_step:,} of {steps:,}"
        run_folder.write_report(str(run_folder.root), {"reached": reached, **scores, **run_config})
    if stopped == "SIGTERM":
        sys.exit(TERMINATED)
    return Fitted(state, scores, current_step, saved, stopped)


def _closing_message(run: RunFolder, current_step: int, steps: int, scores: Mapping[str, float], stopped: str) -> str:
    if not stopped:
        where = "" if run.root is None else f"\nreport, curves and weights are in {run.root}"
        return f"finished: {current_step} of {steps} steps  {format_values(scores)}{where}"
    message = f"stopped by {stopped} after step {current_step} of {steps}"
    if run.root is None:
        return f"{message}; nothing was saved, since there is no run folder"
    return f"{message}; resume with: {command()}"


def _wait_for_saves(checkpoints: Checkpoints | None, monitor: Monitor) -> int | None:
    """Wait until nothing is being written; returns the last step on disk."""
    if checkpoints is None:
        return None
    try:
        checkpoints.wait()
    except Exception as failure:
        monitor.print(f"the last save failed: {failure}")
    return checkpoints.latest()


def _steps_per_epoch(step: Step, feed: Any, steps: int) -> int:
    """The steps of an epoch, or a tenth of all steps where that is unknown, rounded up to whole calls."""
    return -(-(feed.steps or -(-steps // 10)) // step.steps_per_call) * step.steps_per_call


def _check_arguments(step: Any, state: Any, feed: Any, evaluate: Any, best: Any) -> None:
    if not isinstance(step, Step):
        raise TypeError(f"fit: step is a {type(step).__name__}; make it by train.step(objective, optimizer).")
    if not isinstance(state, TrainState):
        raise TypeError(f"fit: state is a {type(state).__name__}; make it by step.init(rng, *model.init(...)).")
    for name, value in (("feed", feed), ("evaluate", evaluate)):
        if not hasattr(value, "stream") and not (name == "evaluate" and value is None):
            raise TypeError(
                f"fit: {name} is a {type(value).__name__}, but must be a feed: train.Feed(arrays, batch), or "
                "train.IterableFeed(make) for batches from an iterator, where make() returns the iterator."
            )
    if best is not None and (evaluate is None or not isinstance(best, Maximize | Minimize)):
        raise TypeError("fit: best needs evaluate=feed, and is train.Maximize('accuracy') or train.Minimize('loss').")


def _check_best_metric(best: Maximize | Minimize | None, names: tuple[str, ...]) -> None:
    if best is not None and best.metric not in names:
        raise NoMatch(f"fit: best is {best}, but the objective returns {', '.join(names)}.")


def _check_steps(step: Step, **numbers: int) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"fit: {name} is {value!r}, but must be an int of at least 1.")
        if value % step.steps_per_call:
            raise ValueError(
                f"fit: {name} is {value}, but must be a multiple of the {step.steps_per_call} steps per call."
            )
