"""Callbacks of fit, several evaluation feeds, and early stopping."""

import inspect
import json
import os
import signal
import threading
import time

import jax
import numpy as np
import pytest

from mlax import train
from mlax.train import read_records
from tests.asserts import unequal_leaves
from tests.train.tasks import OPTIMIZER, arrays, feed, objective
from tests.train.test_fit import STEP, fit, hide_matplotlib  # noqa: F401
from tests.train.test_resuming import interrupted_evaluation


def two_feeds():
    return {"valid": train.Feed(arrays(30, seed=1), batch=8), "test": train.Feed(arrays(24, seed=2), batch=8)}


@pytest.fixture(scope="module")
def uninterrupted():
    """The state after 40 steps without interruption."""
    return fit(None, 40, evaluate=None).state


def recording(calls, answer=None):
    """A callback that records what it is called with; `answer(step)` is what it returns."""

    def each(step, state, metrics, scores):
        calls.append((step, int(state.step), metrics, scores, jax.device_get(state.trainables)))
        return None if answer is None else answer(step)

    return each


def raising(step, state, metrics, scores):
    raise RuntimeError("no pictures today")


def failing_at(step):
    def hyperparams(number):
        if number == step:
            raise RuntimeError("no data")
        return {}

    return hyperparams


def test_each_gets_state_metrics_and_scores_of_that_very_step(tmp_path):
    calls = []
    result = fit(tmp_path / "run", 25, each=recording(calls), each_every=4, evaluate_every=10, save_every=100)
    assert [call[0] for call in calls] == [4, 8, 10, 12, 16, 20, 24, 25]
    records = {r["step"]: r for r in read_records(tmp_path / "run" / "metrics.jsonl") if "loss" in r}
    for step, state_step, metrics, scores, _ in calls:
        assert state_step == step
        assert all(type(value) is float for value in [*metrics.values(), *scores.values()])
        assert metrics["loss"] == pytest.approx(records[step]["loss"], rel=1e-6)
        assert set(scores) == ({"loss", "accuracy"} if step in (10, 20, 25) else set())
    assert not unequal_leaves(calls[-1][-1], jax.device_get(result.state.trainables))
    assert not unequal_leaves(calls[3][-1], jax.device_get(fit(None, 12, evaluate=None).state.trainables))
    assert result.stopped == ""


def test_each_is_called_once_per_call_of_many_steps():
    calls = []
    fit(None, 24, step=train.step(objective, OPTIMIZER, steps_per_call=4), each=recording(calls), each_every=5)
    assert [call[0] for call in calls] == [8, 12, 16, 20, 24], "the calls that reach 5, 10, 15, 20, and the evaluations"


def test_each_stops_the_run_which_continues_only_to_more_steps(tmp_path, uninterrupted, capsys):
    run = tmp_path / "run"
    for _ in range(2):  # the second time it is not trained
        each = recording([], lambda step: "good enough" if step == 12 else None)
        result = fit(run, 38, each=each, each_every=6, config={"width": 2})
        assert (result.step, result.saved, result.stopped) == (12, 12, "good enough")
    result = fit(run, 38, each=recording(calls := []), each_every=6, show=True, config={"width": 2})
    assert result.stopped == "good enough" and not calls
    assert 'ended early: 12 of 38 steps: good enough; it continues with more steps, or resume="anyway"' in (
        capsys.readouterr().out
    )
    with pytest.raises(ValueError, match=r"holds a finished run, 12 of 38 steps, of another configuration"):
        fit(run, 38, config={"width": 3})
    assert not unequal_leaves(fit(run, 40, config={"width": 2}).state, uninterrupted)


def test_resume_anyway_continues_a_run_that_ended_early(tmp_path, uninterrupted):
    assert fit(tmp_path / "run", 40, each=lambda *_: True, each_every=6).stopped == "each returned True"
    result = fit(tmp_path / "run", 40, resume="anyway")
    assert result.stopped == "" and not unequal_leaves(result.state, uninterrupted)


def test_an_error_in_each_is_raised_after_the_state_is_saved_and_the_step_is_called_again(tmp_path, uninterrupted):
    run = tmp_path / "run"
    with pytest.raises(RuntimeError, match="no pictures today"):
        fit(run, 40, each=raising, each_every=7)
    assert train.Checkpoints(run / "checkpoints").latest() == 7
    result = fit(run, 40, each=recording(calls := []), each_every=7)
    assert [call[0] for call in calls] == [7, 10, 14, 20, 21, 28, 30, 35, 40]
    assert calls[0][1] == 7 and "loss" in calls[0][2]
    assert not unequal_leaves(result.state, uninterrupted)


def test_each_is_called_again_if_it_failed_after_the_last_step(tmp_path):
    with pytest.raises(RuntimeError, match="no pictures today"):
        fit(tmp_path / "run", 10, each=raising, each_every=100)
    fit(tmp_path / "run", 10, each=recording(calls := []))
    assert [(call[0], set(call[3])) for call in calls] == [(10, {"loss", "accuracy"})]
    fit(tmp_path / "run", 10, each=recording(calls := []))
    assert not calls, "the run is complete"


def test_a_signal_in_the_evaluation_of_the_second_feed_delays_the_callback_until_the_run_resumes(tmp_path):
    feeds = {**two_feeds(), "test": interrupted_evaluation(signal.SIGTERM, 1)}
    with pytest.raises(SystemExit):
        fit(tmp_path / "run", 20, evaluate=feeds, each=recording(calls := []), each_every=10)
    assert not calls
    fit(tmp_path / "run", 20, evaluate=two_feeds(), each=recording(calls), each_every=10, resume="anyway")
    assert [(call[0], call[1], len(call[3])) for call in calls] == [(10, 10, 4), (20, 20, 4)]
    assert calls[0][2]["loss"] > 0


@pytest.mark.parametrize(
    ("each", "error", "words"),
    [
        (
            lambda step, loss: None,
            TypeError,
            r"called as each\(step, state, metrics, scores\), but takes \(step, loss\)",
        ),
        ([print], TypeError, "each is a list, but must be a function"),
    ],
)
def test_a_callback_of_another_signature_is_refused_before_training(tmp_path, each, error, words):
    with pytest.raises(error, match=words):
        fit(tmp_path / "run", 10, each=each)
    assert not (tmp_path / "run").exists()


def test_an_answer_that_is_neither_a_bool_nor_a_reason_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"each returned a .*Array.*, but must return True, or the reason as a str"):
        fit(tmp_path / "run", 10, each=lambda step, state, metrics, scores: state.step > 3, each_every=5)
    assert fit(None, 10, each=lambda step, *_: np.bool_(step == 5), each_every=5).step == 5


def test_a_signal_during_a_slow_callback_waits_for_it_and_saves(tmp_path):
    def slow(step, state, metrics, scores):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(0.6)

    with pytest.raises(SystemExit) as ended:
        fit(tmp_path / "run", 40, each=slow, each_every=6, grace=0.1)
    assert ended.value.code == 128 + signal.SIGTERM
    assert train.Checkpoints(tmp_path / "run" / "checkpoints").latest() >= 6


def test_several_feeds_are_scored_by_name_and_the_first_decides(tmp_path):
    feeds = two_feeds()
    result = fit(tmp_path / "run", 20, evaluate=feeds)
    assert set(result.scores) == {"valid/loss", "valid/accuracy", "test/loss", "test/accuracy"}
    for name, each in feeds.items():
        alone = STEP.evaluation(result.state, each)
        assert {metric: result.scores[f"{name}/{metric}"] for metric in alone} == alone
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["best"] == "Minimize(metric='valid/loss')" or config["best"] == "Minimize('valid/loss')"
    assert set(config["evaluate"]) == {"valid", "test"}
    assert (
        "| step | valid/loss | valid/accuracy | test/loss | test/accuracy |"
        in (tmp_path / "run" / "report.md").read_text()
    )
    changed = {**two_feeds(), "test": train.Feed(arrays(24, seed=3), batch=8)}
    with pytest.raises(ValueError, match=r"the data of evaluations \(test\) have changed"):
        fit(tmp_path / "run", 30, evaluate=changed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"evaluate": {}}, "evaluate is empty"),
        ({"evaluate": {"a/b": feed()}}, "the evaluation feed 'a/b' needs a name of letters"),
        ({"evaluate": {"train": feed()}}, "cannot be named 'train'"),
        ({"evaluate": {"valid": [1]}}, r"evaluate\['valid'\] is a list, but must be a feed"),
        (
            {"evaluate": two_feeds(), "best": train.Minimize("loss")},
            "but the scores are valid/loss, valid/acc.*, test/",
        ),
        ({"evaluate": None, "patience": 2}, "pass evaluate=feed as well"),
        ({"patience": 0}, "patience is 0"),
        ({"each_every": 0}, "each_every is 0"),
    ],
)
def test_feeds_best_and_patience_are_checked(options, words):
    with pytest.raises((TypeError, ValueError, KeyError), match=words):
        fit(None, 10, **options)


@pytest.fixture
def losses(monkeypatch):
    """A dict of the loss of the evaluation after each step; that of other steps is 1."""
    by_step = {}

    def scripted(self, state, batches):
        return {"loss": by_step.get(int(state.step), 1.0), "accuracy": 0.0}

    monkeypatch.setattr(train.Evaluation, "__call__", scripted)
    return by_step


def test_patience_ends_the_run_and_best_state_restores_the_best_weights(tmp_path, losses):
    losses.update({2: 0.9, 4: 0.5, 6: 0.7, 8: np.nan, 10: 0.6, 12: 0.4})
    weights = {}
    options = {"evaluate_every": 2, "each": lambda step, state, *_: weights.update({step: jax.device_get(state)})}
    result = fit(tmp_path / "run", 40, patience=3, **options)
    assert result.step == 10 and result.best == 4
    assert result.stopped == "loss has not improved in 3 evaluations, after 0.5 at step 4"
    assert not unequal_leaves(jax.device_get(result.best_state()), weights[4])
    report = (tmp_path / "run" / "report.md").read_text()
    assert "- **best so far**: loss 0.5 at step 4" in report and "- **stopped**: loss has not improved" in report

    again = fit(tmp_path / "run", 40, patience=3, **options)
    assert again.stopped == result.stopped and again.step == 10, "it stays as it is"
    more = fit(tmp_path / "run", 40, patience=4, **options)
    assert (more.step, more.best) == (20, 12), "the count goes on: 12 is better, and 14 to 20 are not"


def test_the_patience_that_is_left_survives_a_kill(tmp_path, losses):
    losses.update({2: 0.5})
    with pytest.raises(RuntimeError, match="no data"):  # ends the process as a kill between two saves would
        fit(tmp_path / "run", 40, patience=4, evaluate_every=2, hyperparams=failing_at(7))
    assert fit(tmp_path / "run", 40, patience=4, evaluate_every=2).step == 10
    assert fit(tmp_path / "run", 44, patience=4, evaluate_every=2).step == 18, "with more steps it counts from zero"


def test_an_equal_score_is_no_improvement_and_patience_works_without_a_folder(losses, capsys):
    result = fit(None, 40, patience=2, evaluate_every=2, evaluate=two_feeds(), best=train.Maximize("test/accuracy"))
    assert result.step == 6 and result.stopped.startswith("test/accuracy has not improved in 2 evaluations")
    assert "improved in 1 evaluation, after" in fit(None, 40, patience=1, evaluate_every=2).stopped
    with pytest.raises(ValueError, match="no best state was saved; pass run= to fit"):
        result.best_state()
    assert "patience: the best weights are not kept without a run folder" in capsys.readouterr().err


@pytest.mark.parametrize("mine", [True, False])
def test_an_error_in_one_process_is_raised_in_all_of_them(monkeypatch, mine):
    module = inspect.getmodule(inspect.getmodule(train.Loop).Callback)
    failed = module.FAILED
    gathered = []

    def gather_texts(text, count):  # as if the second process failed, and this one were it or the first
        gathered.append(text)
        return ["", failed]

    monkeypatch.setattr(module, "gather_texts", gather_texts)
    callback = module.Callback(raising if mine else lambda *_: None, 1)
    with pytest.raises(
        RuntimeError, match="no pictures today" if mine else "process 1 failed at step 3; see its output"
    ):
        callback(3, None, {}, {})
    assert gathered == [failed if mine else ""]
