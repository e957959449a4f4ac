"""The evaluations of a run: one or several named feeds, the best score so far, and early stopping by patience."""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mlax.core import NoMatch
from mlax.train._checks import int_at_least
from mlax.train._evaluation import Evaluation
from mlax.train._state import TrainState
from mlax.train.checkpoints._checkpoints import Maximize, Minimize

Criterion = Maximize | Minimize


class BestScore(NamedTuple):
    """The best score so far, the step of its evaluation, and how many evaluations ago that score was first reached."""

    score: float | None = None
    step: int | None = None
    stale: int = 0


class Scoring:
    """Evaluates the feeds of a run, and remembers the last scores, the best one, and when it last improved.

    `notes` are those of the checkpoint that training resumes from; `self.notes()` go into the next one.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        feeds: Mapping[str, Any],
        best: Criterion | None,
        patience: int | None,
        notes: Mapping[str, Any],
    ):
        self.evaluation, self.feeds, self.criterion, self.patience = evaluation, feeds, best, patience
        self.prefix = "evaluation/" if "" in feeds else ""  # of the names that loggers get
        self.scores: Mapping[str, float] = notes.get("scores", {})  # of the last evaluation
        self.step: int | None = notes.get("scored")  # after which it was made
        saved = notes.get("best", {}).get(repr(best))
        self.best = BestScore(*saved) if isinstance(saved, list) else BestScore()
        self._saved_score = self.best.score  # of the best weights on disk

    def prepare(self, state: TrainState) -> None:
        """Compile the evaluation of each feed, and check that the metric of `best` is among the scores."""
        names = [score_name(feed, metric) for feed in self.feeds for metric in self._prepare_feed(state, feed)]
        if self.criterion is not None and self.criterion.metric not in names:
            close = difflib.get_close_matches(self.criterion.metric, names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise NoMatch(f"fit: best is {self.criterion}, but the scores are {', '.join(names)}{hint}")

    def _prepare_feed(self, state: TrainState, name: str) -> tuple[str, ...]:
        try:
            return self.evaluation.prepare(state, self.feeds[name])
        except KeyError as error:
            error.add_note(f"This is {f'evaluate[{name!r}]' if name else 'evaluate'}, the feed of the evaluation.")
            raise

    def evaluate(
        self,
        step: int,
        state: TrainState,
        stopped: Callable[[], str],
        until: Callable[[Iterable[Any]], Iterator[Any]],
    ) -> Mapping[str, float] | None:
        """The scores of all feeds after this step; None if `stopped` ends the evaluation. `until` wraps the batches."""
        scores: dict[str, float] = {}
        for name, feed in self.feeds.items():
            with feed.epoch(stopped=stopped) as batches:
                found = self.evaluation(state, until(batches))
            if stopped():
                return None
            scalars = {metric: value for metric, value in found.items() if isinstance(value, float)}  # no matrices
            scores |= {score_name(name, metric): value for metric, value in scalars.items()}
        self.scores, self.step = scores, step
        return scores

    def count(self) -> bool:
        """Count the last evaluation; returns whether its weights are to be saved, as they are the best so far.

        A score equal to the best one is saved, since it is the later, but is not an improvement.
        """
        if self.criterion is None:
            return False
        score = self.scores[self.criterion.metric]
        if not math.isfinite(score):
            self.best = self.best._replace(stale=self.best.stale + 1)
            return False
        improves = self._compare(self.best.score, score) > 0
        stale = 0 if improves else self.best.stale + 1
        is_best = self._compare(self.best.score, score) >= 0
        self.best = BestScore(score, self.step, stale) if is_best else self.best._replace(stale=stale)
        saving = self._compare(self._saved_score, score) >= 0
        if saving:
            self._saved_score = score
        return saving

    def _compare(self, old: float | None, new: float) -> int:
        """1 if the new score is better than the old one, 0 if it is equal, -1 if it is worse."""
        assert self.criterion is not None
        if old is None or old == new:
            return 1 if old is None else 0
        metric = self.criterion.metric
        return 1 if self.criterion.best_step({0: {metric: old}, 1: {metric: new}}) == 1 else -1

    def forget_saved(self) -> None:
        """Compare with no earlier score to decide what to save, since the best weights may not be on disk."""
        self._saved_score = None

    def restart_patience(self) -> None:
        """Count from zero, for a run that had ended early and is to continue."""
        if self.out_of_patience():
            self.best = self.best._replace(stale=0)

    def out_of_patience(self) -> bool:
        """Whether the last `patience` evaluations were no improvement."""
        return self.patience is not None and self.best.stale >= self.patience

    def reason(self) -> str:
        """Why a run that is out of patience ends."""
        metric = "" if self.criterion is None else self.criterion.metric
        best = "" if self.best.score is None else f", after {self.best.score:.4g} at step {self.best.step}"
        number = f"{self.best.stale} evaluation{'s' * (self.best.stale > 1)}"
        return f"{metric} has not improved in {number}{best}"

    def notes(self) -> dict[str, Any]:
        """What a checkpoint keeps, in JSON."""
        return {
            "scores": self.finite_scores(),
            "scored": self.step,
            "best": {} if self.criterion is None else {repr(self.criterion): list(self.best)},
        }

    def finite_scores(self) -> dict[str, float]:
        """The last scores without NaN and infinities."""
        return {name: value for name, value in self.scores.items() if math.isfinite(value)}


def score_name(feed: str, metric: str) -> str:
    """The name of a metric of a feed; the only feed of a run has the name ""."""
    return f"{feed}/{metric}" if feed else metric


def check_feeds(evaluate: Any) -> dict[str, Any]:
    """The feeds to evaluate with by name; one without a name is named ""."""
    if evaluate is None:
        return {}
    feeds = dict(evaluate) if isinstance(evaluate, Mapping) else {"": evaluate}
    if not feeds:
        raise ValueError('fit: evaluate is empty; pass a feed, several by name, {"valid": feed}, or None.')
    for name, feed in feeds.items():
        check_feed(f"evaluate[{name!r}]" if isinstance(evaluate, Mapping) else "evaluate", feed)
        if isinstance(evaluate, Mapping):
            _check_name(name)
    return feeds


def check_feed(name: str, feed: Any) -> None:
    """Refuse what is not a feed."""
    if not hasattr(feed, "stream"):
        raise TypeError(
            f"fit: {name} is a {type(feed).__name__}, but must be a feed: train.Feed(arrays, batch), or "
            "train.IterableFeed(make) for batches from an iterator, where make() returns the iterator."
        )


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
        raise ValueError(
            f"fit: the evaluation feed {name!r} needs a name of letters, digits, - and _, such as 'valid'."
        )
    if name == "train":
        raise ValueError(
            "fit: an evaluation feed cannot be named 'train', as the metrics of training steps are logged as "
            "train/loss; choose another name, such as 'train_subset'."
        )


def check_patience(patience: Any, best: Criterion | None) -> int | None:
    """`patience` as an int of at least 1, or None; it needs something to improve."""
    if patience is None:
        return None
    if best is None:
        raise ValueError("fit: patience counts evaluations without improvement; pass evaluate=feed as well.")
    return int_at_least(1, patience, "fit: patience")
