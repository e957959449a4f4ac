"""Loggers: what they receive, what a resumed run shows, and that none of them can end a training."""

import json
import sys
import types
from pathlib import Path

import pytest

from mlax import train
from mlax.train import read_records
from tests.train.test_callback import failing_at, two_feeds
from tests.train.test_fit import fit, hide_matplotlib  # noqa: F401


class Recorder:
    """A logger that remembers its calls."""

    def __init__(self):
        self.started, self.values, self.closed = [], [], 0

    def start(self, run, step, config):
        self.started.append((run, step, config))

    def log(self, step, values):
        self.values.append((step, values))

    def close(self):
        self.closed += 1


class Broken(Recorder):
    """A logger that raises in the methods that it is told."""

    def __init__(self, *methods):
        super().__init__()
        for name in methods:
            setattr(self, name, self.fail)

    def fail(self, *arguments):
        raise ConnectionError("the network is down")


def test_a_logger_gets_each_step_each_score_and_the_configuration(tmp_path):
    logger = Recorder()
    fit(tmp_path / "run", 6, evaluate=two_feeds(), evaluate_every=3, loggers=[logger], config={"width": 16})
    ((run, start, config),) = logger.started
    assert (run, start, logger.closed) == (tmp_path / "run", 0, 1)
    assert config["config"] == {"width": 16} and config["steps"] == 6 and "fingerprint" not in config
    training = [(step, values) for step, values in logger.values if "train/loss" in values]
    assert [step for step, _ in training] == [1, 2, 3, 4, 5, 6]
    assert "train/rate" in training[0][1] and "train/step" not in training[0][1]
    scores = {step: set(values) for step, values in logger.values if "valid/loss" in values}
    assert scores == {at: {"valid/loss", "valid/accuracy", "test/loss", "test/accuracy"} for at in (3, 6)}
    assert [step for step, _ in logger.values] == sorted(step for step, _ in logger.values)


def test_the_scores_of_one_feed_are_named_evaluation(tmp_path):
    logger = Recorder()
    fit(tmp_path / "run", 2, loggers=(logger,))
    assert set(logger.values[-1][1]) == {"evaluation/loss", "evaluation/accuracy"}


def test_a_logger_that_raises_is_reported_once_and_training_goes_on(tmp_path, capsys):
    recorder, absent = Recorder(), Broken("start", "log")
    result = fit(tmp_path / "run", 5, loggers=[Broken("log", "close"), absent, recorder], show=True)
    out = capsys.readouterr().out
    assert result.step == 5 and len(recorder.values) == 6 and recorder.closed == 1
    assert out.count("the logger Broken failed, and training continues") == 1
    assert "the logger Broken could not start, and logs nothing: ConnectionError: the network is down" in out
    assert absent.closed == 0


@pytest.mark.parametrize(
    ("loggers", "words"),
    [
        (train.TensorBoard(), "loggers is a TensorBoard; pass a list"),
        ([train.TensorBoard], "the class TensorBoard is not a logger; pass an object with the methods start, log"),
        ([print], "a builtin_function_or_method is not a logger"),
        ([train.TensorBoard()], "TensorBoard: the run has no folder"),
        ([train.WandB("digits")], "train.WandB needs wandb"),
    ],
)
def test_what_is_no_logger_is_refused_before_training(loggers, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises((TypeError, ValueError, ImportError), match=words):
        fit(None, 2, loggers=loggers)


def test_json_lines_of_steps_that_run_again_are_dropped(tmp_path):
    run, options = tmp_path / "run", {"save_every": 5, "evaluate": None, "loggers": [train.JSONLines("more.jsonl")]}
    with pytest.raises(RuntimeError, match="no data"):
        fit(run, 12, hyperparams=failing_at(8), each=lambda *_: None, each_every=1, **options)
    assert len(read_records(run / "more.jsonl")) > 5
    fit(run, 12, **options)
    records = read_records(run / "more.jsonl")
    assert [record["step"] for record in records] == list(range(1, 13))
    assert {"step", "seconds", "train/loss", "train/rate"} <= set(records[0])
    with pytest.raises(ValueError, match=r'fit writes "metrics.jsonl" itself'):
        fit(tmp_path / "other", 2, loggers=[train.JSONLines("metrics.jsonl")])


def test_json_lines_outside_of_the_run_are_appended(tmp_path):
    for name in ("a", "b"):
        fit(tmp_path / name, 2, evaluate=None, loggers=[train.JSONLines(tmp_path / "all" / "log.jsonl")])
    assert [record["step"] for record in read_records(tmp_path / "all" / "log.jsonl")] == [1, 2, 1, 2]


@pytest.fixture
def wandb(monkeypatch):
    """A module in place of wandb, which records what `init` and the runs are called with."""
    module = types.ModuleType("wandb")
    module.runs = []

    class Run:
        def __init__(self, options):
            self.options, self.logged, self.finished = options, [], False
            module.runs.append(self)

        def log(self, values, step):
            self.logged.append((step, values))

        def finish(self):
            self.finished = True

    module.init = lambda **options: Run(options)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_resumed_run_continues_the_same_run_of_wandb(tmp_path, wandb):
    for steps in (4, 6):
        fit(tmp_path / "digits-1", steps, loggers=[train.WandB("digits", tags=["small"])], config={"width": 16})
    first, second = wandb.runs
    assert first.options["project"] == "digits" and first.options["name"] == "digits-1"
    assert first.options["config"]["config"] == {"width": 16} and first.options["tags"] == ("small",)
    assert first.options["id"] == second.options["id"] and second.options["resume"] == "allow"
    assert Path(first.options["dir"]) == tmp_path / "digits-1"
    assert [step for step, values in first.logged + second.logged if "train/loss" in values] == [1, 2, 3, 4, 5, 6]
    assert first.finished and second.finished
    fit(None, 2, loggers=[train.WandB("digits")])
    assert wandb.runs[-1].options["id"] is None and json.dumps(wandb.runs[-1].options["config"])
