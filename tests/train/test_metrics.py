"""Metrics that are not means: against scikit-learn, over any split into batches, microbatches, devices and steps."""

import dataclasses
import math
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as sk
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.exceptions import UndefinedMetricWarning

from mlax import optim, place, train
from tests.train.tasks import MODEL, OPTIMIZER, arrays, feed, init_state, objective

CLASSES = 4
AVERAGES = ("binary", "macro", "micro", "weighted")


def examples(seed=0, n=60, classes=CLASSES):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n).astype(np.int32)
    logits = rng.normal(size=(n, classes)).astype(np.float32) + 2 * np.eye(classes, dtype=np.float32)[labels]
    return logits, labels


def by_sklearn(function, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndefinedMetricWarning)
        return function(*args, **options)


def value_of(metric, mask=None):
    return float(metric.sum(None if mask is None else jnp.asarray(mask)).compute())


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("case", ["all", "absent classes", "nothing right", "no positives"])
def test_precision_recall_and_f1_are_those_of_scikit_learn(average, case):
    classes = 2 if average == "binary" else CLASSES
    logits, labels = examples(classes=classes)
    predictions = logits.argmax(-1).astype(np.int32)
    if case == "absent classes":
        predictions, labels = predictions % 2, labels % 2
    elif case == "nothing right":
        predictions = (labels + 1) % classes
    elif case == "no positives":
        predictions, labels = predictions * 0, labels * 0
    found, wanted = [], []
    for metric, function in (
        (train.Precision, sk.precision_score),
        (train.Recall, sk.recall_score),
        (train.F1, sk.f1_score),
    ):
        found.append(value_of(metric(jnp.asarray(predictions), jnp.asarray(labels), classes=classes, average=average)))
        wanted.append(by_sklearn(function, labels, predictions, average=average, zero_division=0))
    assert found == pytest.approx(wanted, rel=1e-6)


def test_the_default_average_is_binary_for_two_classes_and_macro_for_more():
    for classes, average in ((2, "binary"), (CLASSES, "macro")):
        logits, labels = examples(classes=classes)
        found = train.F1(jnp.asarray(logits.argmax(-1)), jnp.asarray(labels), classes=classes)
        assert value_of(found) == pytest.approx(sk.f1_score(labels, logits.argmax(-1), average=average), rel=1e-6)


def test_a_confusion_matrix_has_labels_in_rows():
    logits, labels = examples()
    predictions = logits.argmax(-1)
    found = train.ConfusionMatrix(jnp.asarray(predictions), jnp.asarray(labels), classes=CLASSES).sum().compute()
    assert np.array_equal(found, sk.confusion_matrix(labels, predictions))


@pytest.mark.parametrize("fault", [([0, -1, 1], [0, 1, 1]), ([0, 1, 1], [0, 2, 1]), ([0, -100, 1], [0, -100, 1])])
def test_predictions_and_labels_that_are_not_classes_give_nan_unless_they_are_masked(fault):
    predictions, labels = map(jnp.int32, fault)
    mask = np.float32([1, 0, 1])
    for average in AVERAGES:
        for metric in (train.Precision, train.Recall, train.F1):
            made = metric(predictions, labels, average=average)
            assert math.isnan(value_of(made))
            assert value_of(made, mask) == 1
    matrix = train.ConfusionMatrix(predictions, labels)
    assert np.isnan(matrix.sum().compute()).all()
    assert np.array_equal(matrix.sum(jnp.asarray(mask)).compute(), np.eye(2))


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_auc_is_that_of_scikit_learn_within_half_the_probability_of_a_shared_bin(scale):
    rng = np.random.default_rng(0)
    labels = rng.random(4000) < 0.3
    scores = (scale * (rng.normal(size=4000) + labels)).astype(np.float32)
    wanted = sk.roc_auc_score(labels, scores)
    for bins, most in ((64, 0.1), (2**14, 4e-4)):
        sums = train.AUC(jnp.asarray(scores), jnp.asarray(labels), bins=bins).sum()
        positives, negatives = (np.asarray(sums.sums[name], np.float64) for name in ("positives", "negatives"))
        bound = (positives / positives.sum() * negatives / negatives.sum()).sum() / 2
        assert abs(float(sums.compute()) - wanted) <= bound + 1e-6
        assert bound < most


def test_auc_counts_ties_as_half_and_takes_infinite_scores():
    labels = jnp.int32([0, 0, 1, 1, 1])
    scores = jnp.float32([-jnp.inf, 0.5, 0.5, 2.0, jnp.inf])
    assert value_of(train.AUC(scores, labels)) == pytest.approx(sk.roc_auc_score(labels, [-9, 0.5, 0.5, 2, 9]))


def test_auc_is_nan_without_positives_or_with_a_nan_score_and_ignores_padding():
    scores, labels = jnp.float32([0.1, jnp.nan, 0.3]), jnp.int32([0, 1, 1])
    assert math.isnan(value_of(train.AUC(scores, labels)))
    assert value_of(train.AUC(scores, labels), [True, False, True]) == 1
    assert math.isnan(value_of(train.AUC(scores, labels * 0), [True, False, True]))


def test_perplexity_weighs_tokens_and_not_sequences():
    losses = np.random.default_rng(0).random((5, 7), np.float32)
    mask = np.arange(7) < np.array([7, 1, 3, 0, 5])[:, None]
    padded = np.where(mask, losses, np.nan)
    wanted = math.exp(losses[mask].mean(dtype=np.float64))
    assert value_of(train.Perplexity(jnp.asarray(padded)), mask) == pytest.approx(wanted, rel=1e-6)
    parts = [train.Perplexity(jnp.asarray(padded[i : i + 1])).sum(jnp.asarray(mask[i : i + 1])) for i in range(5)]
    assert float(sum(parts).compute()) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_accuracy_at_k_is_that_of_scikit_learn_and_of_top_k_among_ties(k):
    logits, labels = examples()
    found = train.accuracy(jnp.asarray(logits), jnp.asarray(labels), k)
    assert found.shape == labels.shape
    assert found.mean() == pytest.approx(sk.top_k_accuracy_score(labels, logits, k=k))
    tied = jnp.round(jnp.asarray(logits)) + 0.0  # top_k orders -0.0 before 0.0
    _, best = jax.lax.top_k(tied, k)
    assert np.array_equal(train.accuracy(tied, jnp.asarray(labels), k), (best == labels[:, None]).any(-1))
    odd = jnp.float32([[jnp.nan] * 4, [0, 0, 0, 1], [1, 0, 0, 0]])
    assert not train.accuracy(odd, jnp.int32([0, -1, 4]), k=1).any()


class RSquared(train.Metric):
    """A metric that a user writes."""

    predictions: jax.Array
    targets: jax.Array
    _: dataclasses.KW_ONLY
    percent: bool = False

    def contributions(self):
        squares = {"squares": self.targets**2, "residuals": (self.predictions - self.targets) ** 2}
        return {"n": jnp.ones_like(self.targets), "sum": self.targets, **squares}

    def compute(self, n, sum, squares, residuals):
        value = 1 - residuals / (squares - sum**2 / n)
        return {"value": value, "percent": 100 * value} if self.percent else value


def test_a_metric_without_compute_cannot_be_created():
    class Incomplete(train.Metric):
        values: jax.Array

    with pytest.raises(TypeError, match=r"abstract method '?compute"):
        Incomplete(jnp.ones(3))


def test_a_metric_is_a_pytree_whose_options_are_static():
    metric = RSquared(jnp.ones(3), jnp.arange(3.0), percent=True)
    leaves, structure = jax.tree.flatten(metric)
    assert len(leaves) == 2 and structure.unflatten(leaves).percent
    assert jax.jit(lambda metric: metric.sum())(metric).metric == RSquared(None, None, percent=True)
    with pytest.raises(TypeError, match=r"sums of RSquared.*cannot be added to RSquared"):
        metric.sum() + dataclasses.replace(metric, percent=False).sum()


def metrics_objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
    logits, new = MODEL.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=True)
    values, _ = objective(batch, trainables, non_trainables, rng, inference_mode=True)
    predictions, labels = logits.argmax(-1), batch["y"]
    metrics = {
        "f1": train.F1(predictions, labels, classes=3),
        "auc": train.AUC(logits[:, 2], labels == 2),
        "perplexity": train.Perplexity(values["loss"]),
        "confusion": train.ConfusionMatrix(predictions, labels, classes=3),
        "r2": RSquared(logits[:, 0], batch["x"][:, 0], percent=True),
    }
    return {**values, **metrics}, new


def reference(state, data):
    logits = np.asarray(MODEL.fwd(data["x"], state.trainables, state.non_trainables, inference_mode=True)[0])
    labels, predictions = data["y"], logits.argmax(-1)
    losses = np.asarray(jax.nn.logsumexp(logits, -1)) - logits[np.arange(len(labels)), labels]
    r2 = sk.r2_score(data["x"][:, 0], logits[:, 0])
    return {
        "loss": losses.mean(),
        "accuracy": (predictions == labels).mean(),
        "f1": sk.f1_score(labels, predictions, average="macro"),
        "auc": sk.roc_auc_score(labels == 2, logits[:, 2]),
        "perplexity": math.exp(losses.mean()),
        "r2/value": r2,
        "r2/percent": 100 * r2,
    }


STEP = train.step(metrics_objective, OPTIMIZER)


@pytest.mark.parametrize("size", [75, 8])  # the last of 10 batches of 8 is padded
def test_an_evaluation_computes_metrics_from_the_sums_of_all_batches(size):
    state = init_state(STEP)
    scores = STEP.evaluation(state, feed(size=size))
    confusion, wanted = scores.pop("confusion"), reference(state, arrays())
    assert scores == pytest.approx(wanted, rel=2e-4) and all(type(value) is float for value in scores.values())
    assert confusion.shape == (3, 3) and confusion.sum() == 75 and np.trace(confusion) == round(75 * wanted["accuracy"])
    assert set(STEP.evaluation.prepare(state, feed(size=size))) == set(scores)


@pytest.mark.parametrize("options", [{}, {"accumulate": 4}, {"steps_per_call": 2}, {"plan": place.data()}], ids=list)
def test_a_step_computes_metrics_of_its_batch_without_padding(options):
    step = train.step(metrics_objective, optim.SGD(0.0), **options)
    state = init_state(step)
    wanted = reference(state, arrays(13))
    padded = {**arrays(16), "mask": np.arange(16) < 13}
    padded["x"][:13], padded["x"][13:] = arrays(13)["x"], np.nan
    padded["y"][:13] = arrays(13)["y"]
    if step.steps_per_call > 1:
        padded = {name: np.stack([leaf] * step.steps_per_call) for name, leaf in padded.items()}
    if step.plan is not None:
        scores = step.evaluation(state, [padded])
        assert scores.pop("confusion").sum() == 13 and scores == pytest.approx(wanted, rel=2e-4)
    found = step(state, padded)[1].to_numpy()
    assert "confusion" not in found
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], np.full(found[name].shape, value), rtol=2e-4, err_msg=name)


def test_fit_keeps_the_best_by_a_metric_and_logs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # curves take longer than the training
    result = train.fit(
        STEP, init_state(STEP), feed(), steps=4, run=tmp_path, evaluate=feed(), evaluate_every=2,
        best=train.Maximize("f1"), show=False,
    )  # fmt: skip
    assert 0 < result.scores["f1"] <= 1 and "confusion" not in result.scores
    log = (tmp_path / "metrics.jsonl").read_text()
    assert '"f1"' in log and '"r2/percent"' in log and "confusion" not in log


def test_sums_are_added_over_devices_in_shard_map_and_over_explicit_axes():
    predictions, labels = np.int32([0, 1, 2, 0, 1, 1, 2, 2]), np.int32([0, 1, 1, 0, 2, 1, 2, 0])
    wanted = pytest.approx(sk.f1_score(labels, predictions, average="macro"))
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Explicit,))
    given = jax.device_put((predictions, labels), NamedSharding(mesh, P("data")))

    def score(predictions, labels):
        return jax.lax.psum(train.F1(predictions, labels, classes=3).sum(), "data").compute()

    with jax.set_mesh(mesh):
        assert jax.jit(jax.shard_map(score, in_specs=P("data"), out_specs=P()))(*given) == wanted
        assert jax.jit(lambda *args: train.F1(*args, classes=3).sum().compute())(*given) == wanted


def test_metrics_take_neither_gradient_nor_memory_per_example():
    logits = jax.ShapeDtypeStruct((512, 1000), jnp.float32)
    labels = jax.ShapeDtypeStruct((512,), jnp.int32)

    def loss(logits, labels):
        metrics = (train.ConfusionMatrix(logits.argmax(-1), labels, classes=1000), train.AUC(logits[:, 0], labels > 0))
        return jnp.sum(logits), [metric.sum() for metric in metrics]

    compiled = jax.jit(jax.grad(loss, has_aux=True)).lower(logits, labels).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16e6  # 2 GB as contributions of each example


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: train.F1(jnp.zeros((4, 3)), jnp.zeros(4, int)).sum(), r"F1: the predictions are .*argmax"),
        (lambda: train.F1(jnp.zeros(4, int), jnp.zeros(4, int)).sum(jnp.ones((4, 2))), r"F1: the mask is .*4, 2"),
        (lambda: train.F1(jnp.zeros(4, int), jnp.zeros(4, int), average="mean").sum().compute(), r"average is 'mean'"),
        (lambda: RSquared(jnp.zeros((4, 1)), jnp.zeros(4)).sum(), r"contributions 'n' are"),
        (lambda: train.accuracy(jnp.zeros((4, 3)), jnp.zeros(3, int)), r"accuracy: the logits are"),
    ],
)
def test_metrics_of_other_shapes_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_loss_that_is_a_metric_is_refused():
    step = train.step(lambda batch, w, s, **_: ({"loss": train.Perplexity(batch["x"])}, s), OPTIMIZER)
    with pytest.raises(TypeError, match=r"the objective's 'loss' is .*but must be an array"):
        step(init_state(step), {"x": jnp.ones(3)})
