"""fit: the training loop."""

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jax import random

from mlax.core import NoMatch
from mlax.train._divergence import Divergence
from mlax.train._monitor import Monitor, describe_run, format_values
from mlax.train._run import Run, command, configuration, export_weights, open_checkpoints, record_config, restore_latest
from mlax.train._signals import TERMINATED, Signals, heartbeat
from mlax.train._state import TrainState
from mlax.train._step import Step
from mlax.train.checkpoints._checkpoints import Checkpoints, Maximize, Minimize


class Fitted(NamedTuple):
    """The result of `fit`."""

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
    on Ctrl-C, after which `fit` returns. The last `keep` checkpoints are kept, and the `best` one, by default that with
    the lowest loss. After 20 non-finite steps in a row the weights of an earlier checkpoint are restored, at most
    `rollbacks` times. The folder also holds the configuration, to which `config` is added, the metrics, their curves, a
    report and the weights. `state` is donated: use the one in the result.
    """
    _check_arguments(step, state, feed, evaluate, best)
    evaluate_every = _steps_per_epoch(step, feed, steps) if evaluate_every is None else evaluate_every
    save_every = evaluate_every if save_every is None else save_every
    _check_steps(step, steps=steps, evaluate_every=evaluate_every, save_every=save_every)
    best = best or (Minimize("loss") if evaluate is not None else None)
    with Run(run) as folder, Signals() as signals:
        checkpoints = open_checkpoints(folder, keep, best, resume)
        at, state, notes = restore_latest(folder, checkpoints, state)
        saved_at = scored_at = at
        scores = notes.get("scores", {})
        parts = configuration(
            step=repr(step),
            feed=repr(feed),
            evaluate=None if evaluate is None else repr(evaluate),
            steps=steps,
            config=config,
            seed=f"{random.key_impl(state.rng)} {random.key_data(state.rng).tolist()}",
        )
        changes = record_config(folder, parts, at, steps)
        monitor = Monitor(folder, step, feed, at, steps, tensorboard=tensorboard, show=show)
        divergence = Divergence(feed, checkpoints, monitor, rollbacks=rollbacks)
        monitor.print(describe_run(folder, parts, changes, state.trainables, at))
        if at >= steps:
            monitor.print(_closing_message(folder, at, steps, scores, ""))
            return Fitted(state, scores, at, checkpoints.latest() if checkpoints is not None else None, "")

        def save() -> int:
            if checkpoints is not None and at > saved_at:
                heartbeat(at, "saving")
                finite = {name: value for name, value in scores.items() if math.isfinite(value)}
                current = finite if scored_at == at else {}  # weights that were not evaluated cannot be the best
                checkpoints.save(at, state, metrics=current, notes={"scores": finite, "feed": batches.position()})
                if failure := checkpoints.failure():
                    monitor.print(f"a save failed, and training continues: {failure}")
            return at

        def until_signal(batches: Iterable[Any]) -> Iterator[Any]:
            for batch in batches:
                yield batch
                heartbeat(at, "evaluation")
                if signals.poll_all():
                    return

        stream = feed.stream(
            at, steps, steps_per_call=step.steps_per_call, stopped=signals.pending, position=notes.get("feed")
        )
        with monitor, stream as batches:
            for batch in batches:
                if not step.aot.compiled:
                    with signals.killable():
                        heartbeat(at, "compiling")
                        step.aot.compile(state, batch)
                        if evaluate is not None:
                            _check_best(best, step.evaluation.prepare(state, evaluate))
                heartbeat(at, "step")
                state, metrics = step(state, batch)
                at += step.steps_per_call
                heartbeat(at, "after a step")
                ending = at >= steps or bool(signals.poll_all())
                evaluating = evaluate is not None and (at % evaluate_every == 0 or at >= steps)
                saving = ending or (checkpoints is not None and at % save_every == 0)
                records = monitor.log_metrics(at, metrics, wait=evaluating or saving)
                if divergence.count(records):
                    state = divergence.roll_back(state)
                if evaluate is not None and evaluating and not signals.pending():
                    heartbeat(at, "evaluation")
                    with evaluate.epoch(stopped=signals.pending) as test:
                        found = step.evaluation(state, until_signal(test))
                    if not signals.pending():
                        scores, scored_at = found, at
                        monitor.log_evaluation(at, scores)
                # amid skipped steps only the last one is saved, since retention might delete the checkpoint before them
                if ending or (saving and not divergence.skipped):
                    saved_at = save()
                if ending or signals.pending():
                    break
                heartbeat(at, "waiting for data")
            signals.acknowledge()
            save()
            heartbeat(at, "ending")
            saved = _wait_for_saves(checkpoints, monitor)
            stopped = signals.pending() if at < steps else ""
            monitor.print(_closing_message(folder, at, steps, scores, stopped))
        export_weights(folder, step.optimizer, state, checkpoints, monitor.print)
        folder.update_curves(last=not stopped)
        folder.write_report(str(folder.folder), {"reached": f"step {at:,} of {steps:,}", **scores, **parts})
    if stopped == "SIGTERM":
        sys.exit(TERMINATED)
    return Fitted(state, scores, at, saved, stopped)


def _closing_message(run: Run, at: int, steps: int, scores: Mapping[str, float], stopped: str) -> str:
    if not stopped:
        where = "" if run.folder is None else f"\nreport, curves and weights are in {run.folder}"
        return f"finished: {at} of {steps} steps  {format_values(scores)}{where}"
    message = f"stopped by {stopped} after step {at} of {steps}"
    if run.folder is None:
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
            raise TypeError(f"fit: {name} is a {type(value).__name__}, but must be a feed, such as train.Feed.")
    if best is not None and (evaluate is None or not isinstance(best, Maximize | Minimize)):
        raise TypeError("fit: best needs evaluate=feed, and is train.Maximize('accuracy') or train.Minimize('loss').")


def _check_best(best: Maximize | Minimize | None, names: tuple[str, ...]) -> None:
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
