"""Metrics of classifiers: accuracy at k, precision, recall, F1, the confusion matrix, ROC AUC and perplexity."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mlax._jax import explicit_sharding
from mlax._metric import Metric
from mlax.core import signature

Average = Literal["binary", "macro", "micro", "weighted"]


def accuracy(logits: jax.Array, labels: jax.Array, k: int = 1) -> jax.Array:
    """Top-k accuracy per example: whether the label is among the k largest logits, (..., v) and (...) to (...) bool.

    Of equal logits the first is larger, as for `argmax`. A label that is not a class, or whose logit is NaN, is not
    among the largest.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"accuracy: the logits are {signature(logits)} and the labels {signature(labels)}; the labels must have "
            "the axes of the logits without the last."
        )
    index = jnp.where(labels < 0, logits.shape[-1], labels.astype(np.int32))[..., None]
    chosen = jnp.take_along_axis(logits, index, -1, mode="fill", fill_value=jnp.nan)
    earlier = lax.broadcasted_iota(np.int32, logits.shape, logits.ndim - 1) < index
    larger = ~(logits <= chosen) | ((logits == chosen) & earlier)  # NaN is not <=
    return jnp.sum(larger, -1, dtype=np.int32) < k


class ClassCounts(Metric):
    """Counts of each class: examples predicted correctly, predicted, and labelled as it."""

    predictions: jax.Array  # integers or booleans, such as logits.argmax(-1) or logits > 0
    labels: jax.Array  # (b,) integers, the true classes
    _: dataclasses.KW_ONLY
    classes: int = 2  # how many there are
    average: Average | None = None  # None: "binary" for 2 classes, "macro" for more

    def reduce(self, weights: jax.Array) -> dict[str, jax.Array]:
        """The weighted counts, (classes,) each."""
        _check_same_shape(self, self.predictions, self.labels)
        predictions, labels = (each.astype(np.int32) for each in (self.predictions, self.labels))
        counts = {
            "correct": _histogram(labels, jnp.where(predictions == labels, weights, 0), self.classes),
            "predicted": _histogram(predictions, weights, self.classes),
            "labelled": _histogram(labels, weights, self.classes),
        }
        fault = _nan_if_outside(self.classes, weights, predictions, labels)
        return {name: count + fault for name, count in counts.items()}

    def _average(self, part: Any, whole: Any, predicted: Any, labelled: Any) -> Any:
        """The ratio of `part` to `whole` for each class, averaged over classes; 0 where `whole` is 0."""
        xp = part.__array_namespace__()  # NumPy in float64 at the end of an evaluation
        match self.average or ("binary" if self.classes == 2 else "macro"):
            case "binary":
                return _ratio(xp, part[1], whole[1])
            case "micro":
                return _ratio(xp, part.sum(), whole.sum())
            case "macro":
                weights = (predicted + labelled != 0).astype(part.dtype)
            case "weighted":
                weights = labelled
            case other:
                raise ValueError(
                    f"{type(self).__name__}: average is {other!r}; pass 'binary', 'macro', 'micro' or 'weighted'."
                )
        return _ratio(xp, (weights * _ratio(xp, part, whole)).sum(), weights.sum())


class Precision(ClassCounts):
    """Precision: the fraction of the examples predicted as a class that are of it.

    Options and averages are those of `train.F1`.
    """

    def compute(self, correct: Any, predicted: Any, labelled: Any) -> Any:
        """Precision from the counts."""
        return self._average(correct, predicted, predicted, labelled)


class Recall(ClassCounts):
    """Recall, or sensitivity: the fraction of the examples of a class that are predicted as it.

    Options and averages are those of `train.F1`.
    """

    def compute(self, correct: Any, predicted: Any, labelled: Any) -> Any:
        """Recall from the counts."""
        return self._average(correct, labelled, predicted, labelled)


class F1(ClassCounts):
    """The F1 score: the harmonic mean of precision and recall, `2 correct / (predicted + labelled)`.

    `average` has the meaning it has in scikit-learn: "binary" is the score of class 1, "macro" the mean over the
    classes that occur among predictions or labels, "weighted" the same weighted by labels, "micro" the score of the
    counts summed over classes; by default "binary" for 2 classes and "macro" for more. A ratio whose denominator is 0
    is 0. Predictions and labels are integers or booleans of one shape, (b,) or (b, t); if one that is not masked is
    outside of 0 to classes - 1, the score is NaN. Labels of several classes per example, (b, c) booleans, are examples
    of 2 classes.
    """

    def compute(self, correct: Any, predicted: Any, labelled: Any) -> Any:
        """F1 from the counts."""
        return self._average(2 * correct, predicted + labelled, predicted, labelled)


class ConfusionMatrix(Metric):
    """The confusion matrix: how many examples of each class, a row, were predicted as each class, a column.

    It is not a scalar, so it is not logged: `step.evaluation(state, feed)` returns it, a NumPy array in float64. All of
    it is NaN if a prediction or label that is not masked is outside of 0 to classes - 1.
    """

    predictions: jax.Array  # integers or booleans, (b,) or (b, t)
    labels: jax.Array  # (b,) integers, the true classes
    _: dataclasses.KW_ONLY
    classes: int = 2  # how many there are

    def reduce(self, weights: jax.Array) -> dict[str, jax.Array]:
        """The weighted counts, (classes, classes)."""
        _check_same_shape(self, self.predictions, self.labels)
        predictions, labels = (each.astype(np.int32) for each in (self.predictions, self.labels))
        counts = _histogram(labels * self.classes + predictions, weights, self.classes**2)
        counts += _nan_if_outside(self.classes, weights, predictions, labels)
        return {"counts": counts.reshape(self.classes, self.classes)}

    def compute(self, counts: Any) -> Any:
        """The matrix."""
        return counts


class AUC(Metric):
    """The area under the ROC curve: the probability that a positive example has a higher score than a negative one.

    `scores`, (b,) or (b, t), are logits or anything else that increases with the probability; `labels` are 0 or 1. The
    scores are counted in `bins`, which are finest around 0, so logits are resolved better than probabilities. Examples
    in the same bin count as ties, and so half: the error is at most half the probability that a positive and a negative
    example fall into the same bin. It is NaN if there are no positive or no negative examples, as in scikit-learn, and
    if a score is NaN.
    """

    scores: jax.Array  # (b,), higher for the positive class
    labels: jax.Array  # (b,) 0 or 1
    _: dataclasses.KW_ONLY
    bins: int = 2**14  # of the histogram of scores

    def reduce(self, weights: jax.Array) -> dict[str, jax.Array]:
        """The weighted histograms of both classes, (bins,) each."""
        _check_same_shape(self, self.scores, self.labels)
        scores = self.scores.astype(jnp.float32)
        weights = jnp.where(jnp.isnan(scores) & (weights != 0), jnp.nan, weights)
        squashed = jnp.sign(scores) * (1 - 1 / (1 + jnp.abs(scores)))  # from -1 to 1
        index = jnp.clip(jnp.nan_to_num((squashed + 1) * (self.bins / 2)), 0, self.bins - 1).astype(np.int32)
        is_positive = self.labels.astype(jnp.float32) > 0.5
        return {
            "positives": _histogram(index, jnp.where(is_positive, weights, 0), self.bins),
            "negatives": _histogram(index, jnp.where(is_positive, 0, weights), self.bins),
        }

    def compute(self, positives: Any, negatives: Any) -> Any:
        """The area, by the trapezoidal rule."""
        below = negatives.cumsum() - negatives / 2
        return (positives / positives.sum() * (below / negatives.sum())).sum()


class Perplexity(Metric):
    """Perplexity: the exponential of the mean negative log-likelihood per token, over all tokens of all batches.

    `losses` are the cross-entropies of the tokens, (b, t), in nats.
    """

    losses: jax.Array  # of tokens, in nats

    def contributions(self) -> dict[str, jax.Array]:
        """The loss of each token, and 1."""
        return {"loss": self.losses, "tokens": jnp.ones_like(self.losses)}

    def compute(self, loss: Any, tokens: Any) -> Any:
        """The exponential of the mean."""
        mean = loss / tokens
        return mean.__array_namespace__().exp(mean)


def _histogram(index: jax.Array, weights: jax.Array, size: int) -> jax.Array:
    """The sum of the weights of each index, (size,) float32; indices outside of 0 to size - 1 are left out."""
    index = jnp.where(index < 0, size, index)  # a negative one would count from the end
    sharding = explicit_sharding(index)
    replicated = None if sharding is None else NamedSharding(sharding.mesh, P(None))
    return jnp.zeros(size, jnp.float32).at[index].add(weights, mode="drop", out_sharding=replicated)


def _nan_if_outside(classes: int, weights: jax.Array, predictions: jax.Array, labels: jax.Array) -> jax.Array:
    """NaN if an index with a weight is not a class, else 0: left out, it would make a plausible score of the others."""
    low, high = jnp.minimum(predictions, labels), jnp.maximum(predictions, labels)
    return jnp.where(jnp.any(((low < 0) | (high >= classes)) & (weights != 0)), jnp.float32(jnp.nan), jnp.float32(0))


def _ratio(xp: Any, part: Any, whole: Any) -> Any:
    """The quotient, or 0 where `whole` is 0; NaN stays NaN."""
    return xp.where(whole == 0, 0, part / xp.where(whole == 0, 1, whole))


def _check_same_shape(metric: Metric, first: jax.Array, labels: jax.Array) -> None:
    if first.shape != labels.shape:
        name = dataclasses.fields(metric)[0].name  # pyright: ignore[reportArgumentType]
        raise ValueError(
            f"{type(metric).__name__}: the {name} are {signature(first)} and the labels {signature(labels)}, but they "
            "must have the same shape; take the class with logits.argmax(-1), for example."
        )
