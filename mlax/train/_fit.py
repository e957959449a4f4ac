"""fit: the training loop."""

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mlax.core import NoMatch
from mlax.train._export import export_weights
from mlax.train._heartbeat import heartbeat
from mlax.train._monitor import Monitor, describe_run, format_values
from mlax.train._run import (
    Run,
    command,
    configuration,
    describe_key,
    open_checkpoints,
    record_config,
    restore_latest,
)
from mlax.train._signals import TERMINATED, Signals
from mlax.train._state import TrainState
from mlax.train._step import Step
from mlax.train.checkpoints._checkpoints import Checkpoints, Maximize, Minimize


class Fitted(NamedTuple):
    """What `fit` gives."""

    state: TrainState
    scores: Mapping[str, float]  # of the last evaluation
    step: int
    saved: int | None  # the last step that is on disk
    stopped: str  # the signal that ended it early, or nothing


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
    """Train until `steps` batches were seen, from where the folder `run` was left, if it is there.

    It evaluates every `evaluate_every` steps (an epoch) and saves every `save_every` (the same), at the end, and when
    SIGTERM or Ctrl-C come; after SIGTERM it exits, after Ctrl-C it returns. The last `keep` checkpoints stay, and the
    best one by `best` (the lowest loss). The folder is the report: configuration, metrics, curves, weights. `config`
    is whatever is to be noted with them. `state` is donated: go on with the state that comes back.
    """
    _check(step, state, feed, evaluate, best)
    evaluating = _steps_per_epoch(step, feed, steps) if evaluate_every is None else evaluate_every
    saving = evaluating if save_every is None else save_every
    _check_steps(step, steps=steps, evaluate_every=evaluating, save_every=saving)
    best = best or (Minimize("loss") if evaluate is not None else None)
    with Run(run) as folder, Signals() as signals:
        checkpoints = open_checkpoints(folder, keep, best, resume)
        at, state, notes = restore_latest(folder, checkpoints, state)
        saved_at = scored_at = at
        scores = notes.get("scores", {})
        parts = configuration(
            step=step, feed=feed, evaluate=evaluate, steps=steps, config=config, seed=describe_key(state)
        )
        changed = record_config(folder, parts, at, steps)
        watch = Monitor(folder, step, feed, at, steps, rollbacks, tensorboard, show and folder.leads)
        watch.say(describe_run(folder, parts, changed, state, at))
        if at >= steps:
            watch.say(_closing_message(folder, at, steps, scores, ""))
            return Fitted(state, scores, at, checkpoints.latest() if checkpoints is not None else None, "")

        def save() -> int:
            if checkpoints is not None and at > saved_at:
                heartbeat(at, "saving")
                finite = {name: value for name, value in scores.items() if math.isfinite(value)}
                tested = finite if scored_at == at else {}  # or weights that nobody has tested might be the best
                checkpoints.save(at, state, metrics=tested, notes={"scores": finite, "feed": batches.position()})
                if failure := checkpoints.failure():
                    watch.say(f"a save failed, and training goes on: {failure}")
            return at

        def until_told(batches: Iterable[Any]) -> Iterator[Any]:
            for batch in batches:
                yield batch
                heartbeat(at, "evaluation")
                if signals.together():
                    return

        stream = feed.stream(at, steps, stacked=step.many, stopped=signals.asked, position=notes.get("feed"))
        with watch, stream as batches:
            for batch in batches:
                if not step.once.compiled:
                    with signals.away():
                        heartbeat(at, "compiling")
                        step.once.compile(state, batch)
                        if evaluate is not None:
                            step.evaluation.prepare(state, evaluate)
                            _check_best(best, step.evaluation.names)
                heartbeat(at, "step")
                state, metrics = step(state, batch)
                at += step.many
                heartbeat(at, "after a step")
                ending = at >= steps or bool(signals.together())
                evaluates = evaluate is not None and (at % evaluating == 0 or at >= steps)
                saves = ending or (checkpoints is not None and at % saving == 0)
                state = watch.after(at, metrics, state, checkpoints, caught_up=evaluates or saves)
                saves = ending or (saves and not watch.skipping.row)  # or the last good ones might be rotated away
                if evaluate is not None and evaluates and not signals.asked():
                    heartbeat(at, "evaluation")
                    with evaluate.epoch(stopped=signals.asked) as test:
                        found = step.evaluation(state, until_told(test))
                    if not signals.asked():
                        scores, scored_at = watch.evaluated(at, found), at
                if saves:
                    saved_at = save()
                if ending or signals.asked():
                    break
                heartbeat(at, "waiting for data")
            signals.heard()
            save()
            heartbeat(at, "ending")
            saved = _wait_for_saves(checkpoints, watch)
            stopped = signals.asked() if at < steps else ""
            watch.say(_closing_message(folder, at, steps, scores, stopped))
        export_weights(folder, step, state, checkpoints, watch.say)
        folder.draw(last=not stopped)
        folder.report(str(folder.folder), {"reached": f"step {at:,} of {steps:,}", **scores, **parts})
    if stopped == "SIGTERM":
        sys.exit(TERMINATED)
    return Fitted(state, scores, at, saved, stopped)


def _closing_message(folder: Run, at: int, steps: int, scores: Mapping[str, float], stopped: str) -> str:
    if not stopped:
        where = "" if folder.folder is None else f"\nreport, curves and weights are in {folder.folder}"
        return f"finished: {at} of {steps} steps  {format_values(scores)}{where}"
    words = f"stopped by {stopped} after step {at} of {steps}"
    if folder.folder is None:
        return f"{words}; nothing was saved, since no run folder was given"
    return f"{words}; go on with: {command()}"


def _wait_for_saves(checkpoints: Checkpoints | None, watch: Monitor) -> int | None:
    """The last step that is on disk, once nothing is being written any more."""
    if checkpoints is None:
        return None
    try:
        checkpoints.wait()
    except Exception as failure:
        watch.say(f"the last save failed: {failure}")
    return checkpoints.latest()


def _steps_per_epoch(step: Step, feed: Any, steps: int) -> int:
    """The steps of an epoch, or a tenth of all where that is not known, as a multiple of those of one call."""
    return -(-(feed.steps or -(-steps // 10)) // step.many) * step.many


def _check(step: Any, state: Any, feed: Any, evaluate: Any, best: Any) -> None:
    if not isinstance(step, Step):
        raise TypeError(f"fit: {type(step).__name__} is no step; make one by train.step(objective, optimizer).")
    if not isinstance(state, TrainState):
        raise TypeError(f"fit: {type(state).__name__} is no state; make one by step.init(rng, *model.init(...)).")
    for name, given in (("feed", feed), ("evaluate", evaluate)):
        if not hasattr(given, "stream") and not (name == "evaluate" and given is None):
            raise TypeError(f"fit: {name} is a {type(given).__name__}, but must be a feed, as train.Feed is.")
    if best is not None and (evaluate is None or not isinstance(best, Maximize | Minimize)):
        raise TypeError("fit: best needs evaluate=feed, and is train.Maximize('accuracy') or train.Minimize('loss').")


def _check_best(best: Maximize | Minimize | None, names: tuple[str, ...]) -> None:
    if best is not None and best.metric not in names:
        raise NoMatch(f"fit: best is {best}, but the objective gives {', '.join(names)}.")


def _check_steps(step: Step, **numbers: int) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"fit: {name} is {value!r}, but must be an int of at least 1.")
        if value % step.many:
            raise ValueError(f"fit: {name} is {value}, but must be a multiple of the {step.many} steps of one call.")
