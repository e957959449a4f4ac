"""fit: it resumes bitwise, logs every step once, handles signals and divergence, and writes a report."""

import contextlib
import functools
import inspect
import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from mlax import files, optim, train
from mlax.train import Divergence, RunFolder, read_records
from tests.asserts import unequal_leaves
from tests.train.tasks import OPTIMIZER, arrays, feed, init_state, objective
from tests.train.test_step import compilations

STEP = train.step(objective, OPTIMIZER)


@pytest.fixture(autouse=True)
def hide_matplotlib(monkeypatch):
    """Matplotlib takes a second to import, so only the uninterrupted run plots, as it alone writes report.html."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def fit(run, steps, *, step=STEP, data=None, **options):
    test = train.Feed(arrays(30, seed=1), batch=8)
    return train.fit(
        step, init_state(step), data or feed(), steps=steps, run=run, **{"evaluate": test, "show": False, **options}
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, write_html_report):
    run = tmp_path_factory.mktemp("runs") / "uninterrupted"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect.getmodule(train.fit), "write_html_report", write_html_report)
        return run, fit(run, 40)


def test_an_interrupted_run_ends_bitwise_equal(uninterrupted, tmp_path):
    for steps in (7, 13, 22, 40):  # in the middle of an epoch of 10
        result = fit(tmp_path / "cut", steps)
    assert result.step == result.saved == 40
    assert not unequal_leaves(result.state, uninterrupted[1].state)
    assert result.scores == uninterrupted[1].scores


def test_every_step_and_every_evaluation_is_logged_once(uninterrupted, tmp_path):
    for steps in (15, 40):
        fit(tmp_path / "cut", steps, save_every=10, evaluate_every=10)
    for run in (uninterrupted[0], tmp_path / "cut"):
        records = read_records(run / "metrics.jsonl")
        assert [r["step"] for r in records if "loss" in r] == list(range(1, 41))
        assert {10, 20, 30, 40} <= {r["step"] for r in records if "evaluation" in r}
        assert len({r["step"] for r in records if "evaluation" in r}) == len([r for r in records if "evaluation" in r])
    assert [r["step"] for r in records] == sorted(r["step"] for r in records)
    assert {"step", "seconds", "loss", "accuracy", "gradient_norm", "rate", "skipped"} <= set(records[0])


def test_records_after_the_step_to_resume_from_are_replaced(tmp_path):
    run = tmp_path / "run"
    fit(run, 10)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss": 1.0}\n{"step": 12, "lo')  # logged, but killed before the save
    fit(run, 20)
    steps = [r["step"] for r in read_records(run / "metrics.jsonl") if "loss" in r]
    assert steps == list(range(1, 21))


def test_the_folder_holds_configuration_metrics_curves_report_and_weights(uninterrupted):
    run, result = uninterrupted
    for name in (
        "config.json",
        "metrics.jsonl",
        "curves.png",
        "report.md",
        "report.html",
        "last.safetensors",
        "best.safetensors",
    ):
        assert (run / name).stat().st_size > 0, name
    config = json.loads((run / "config.json").read_text())
    assert config["steps"] == 40 and "AdamW" in config["step"] and "75 examples" in config["feed"]
    assert "| 40 |" in (run / "report.md").read_text()
    assert not unequal_leaves(
        files.load(run / "last.safetensors")["trainables"], jax.device_get(result.state.trainables)
    )
    scores = {r["step"]: r["evaluation"]["loss"] for r in read_records(run / "metrics.jsonl") if "evaluation" in r}
    assert train.Checkpoints(run / "checkpoints", best=train.Minimize("loss")).best() == min(scores, key=scores.get)


def test_a_finished_run_is_not_run_again(uninterrupted, tmp_path):
    before = (uninterrupted[0] / "metrics.jsonl").read_text()
    result = fit(uninterrupted[0], 40)
    assert not unequal_leaves(result.state, uninterrupted[1].state)
    assert (uninterrupted[0] / "metrics.jsonl").read_text() == before


def test_nothing_compiles_after_the_first_step_and_evaluation(tmp_path):
    fit(None, 10)
    assert compilations(lambda: fit(tmp_path / "run", 30)) <= compilations(lambda: fit(tmp_path / "other", 10))
    assert len(STEP.aot.compiled) == len(STEP.evaluation.aot.compiled) == 1


def test_many_steps_per_call_are_logged_one_by_one(tmp_path):
    result = fit(tmp_path / "run", 40, step=train.step(objective, OPTIMIZER, steps_per_call=4))
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 41))
    assert result.step == 40 and int(result.state.step) == 40
    with pytest.raises(ValueError, match="steps is 41, but must be a multiple of the 4 steps per call"):
        fit(None, 41, step=train.step(objective, OPTIMIZER, steps_per_call=4))


def poisoned_feed(steps):
    """A feed whose batches of some steps hold NaN, and the ids of their examples."""
    clean = feed()
    bad = {i for step in steps for i in clean.indices(step).tolist()}

    def poison(batch, generator):
        return {**batch, "x": np.where(np.isin(batch["id"], list(bad))[:, None], np.float32(np.nan), batch["x"])}

    return feed(map_batch=poison), bad


def test_a_non_finite_step_is_skipped_and_its_examples_are_logged(tmp_path):
    data, bad = poisoned_feed([3])
    result = fit(tmp_path / "run", 10, data=data)
    events = [r for r in read_records(tmp_path / "run" / "metrics.jsonl") if "event" in r]
    assert [(e["step"], set(e["ids"])) for e in events] == [(4, bad)]
    assert int(result.state.skipped) == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.state.trainables))


def test_non_finite_steps_without_end_raise_after_the_last_rollback(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect.getmodule(train.fit), "Divergence", functools.partial(Divergence, patience=4))
    data, _ = poisoned_feed(range(3, 10))
    with pytest.raises(
        train.Diverged,
        match=r"(?s)none of the steps \d+ to \d+ was finite.*the first NaN is in.*Lower the learning rate",
    ) as caught:
        fit(tmp_path / "run", 100, data=data, save_every=2, rollbacks=1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(caught.value.state.trainables))
    events = [r["event"] for r in read_records(tmp_path / "run" / "metrics.jsonl") if "event" in r]
    assert len([event for event in events if event.startswith("rolled back to the weights of step")]) == 1
    (layer,) = [event for event in events if event.startswith("the first NaN")]  # searched for once
    assert layer.startswith("the first NaN is in the argument batch/x: float32[8, ") and layer in str(caught.value)


def signaling_feed(number, at):
    """A feed that sends this process a signal when it loads the batch of a step."""

    def strike(batch, generator):
        if int(batch["id"][0]) == first:
            os.kill(os.getpid(), number)
        return batch

    first = int(feed().indices(at)[0])
    return feed(map_batch=strike, prefetch=1)


def test_ctrl_c_saves_and_returns_and_the_resumed_run_is_bitwise_equal(tmp_path, uninterrupted, capsys):
    handler = signal.getsignal(signal.SIGINT)
    result = fit(tmp_path / "run", 40, data=signaling_feed(signal.SIGINT, 5), show=True)
    assert result.stopped == "SIGINT" and result.saved == result.step < 10
    assert "resume with:" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is handler
    assert not unequal_leaves(fit(tmp_path / "run", 40).state, uninterrupted[1].state)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_saves_and_exits(tmp_path, uninterrupted, number):
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path / "run", 40, data=signaling_feed(number, 5))
    assert ended.value.code == 128 + number
    assert 4 <= train.Checkpoints(tmp_path / "run" / "checkpoints").latest() <= 8
    assert not unequal_leaves(fit(tmp_path / "run", 40).state, uninterrupted[1].state)


def test_the_command_to_resume_is_the_one_that_was_typed(monkeypatch):
    command = inspect.getmodule(RunFolder).command
    monkeypatch.setattr(sys, "orig_argv", ["/venv/bin/python3", "/venv/bin/mlax", "train", "a b.py"])
    assert command() == "mlax train 'a b.py'"
    monkeypatch.setattr(sys, "orig_argv", ["venv/bin/python", "-m", "job"])
    assert command() == "venv/bin/python -m job"


def test_a_run_folder_is_locked(tmp_path):
    with RunFolder(tmp_path / "run"), pytest.raises(RuntimeError, match="another process is training in"):
        fit(tmp_path / "run", 10)


def test_configuration_progress_and_changes_are_printed(tmp_path, capsys):
    fit(tmp_path / "run", 30, show=True, config={"width": 16, "folder": Path("data")})
    out = capsys.readouterr().out
    assert "width: 16, folder: data\n" in out
    for words in ("AdamW", "75 examples", "all parameters", "width", "30/30", "steps/s", "finished: 30 of 30"):
        assert words in out
    fit(tmp_path / "run", 40, show=True, config={"width": 17, "folder": "data"})
    out = capsys.readouterr().out
    assert "resumes from step 30" in out
    assert "changed since this run started: width was 16 and is now 17" in out
    with pytest.raises(ValueError, match=r"a finished run, 40 of 40 steps, of another configuration \(width was 17"):
        fit(tmp_path / "run", 40, config={"width": 18, "folder": "data"})
    words = r"feed was \.\.\. batches of 8, 10 \.\.\. and is now \.\.\. batches of 15, 5 \.\.\.\); choose"
    with pytest.raises(ValueError, match=words):
        fit(tmp_path / "run", 40, config={"width": 17, "folder": "data"}, data=train.Feed(arrays(75), batch=15, seed=0))


def test_the_folder_of_another_model_or_optimizer_is_rejected_with_advice(tmp_path):
    fit(tmp_path / "run", 10)
    words = r"holds the run of another model or optimizer: .* (not saved|not in the target).*; choose another.*restart"
    with pytest.raises(ValueError, match=words) as caught:
        fit(tmp_path / "run", 20, step=train.step(objective, optim.Lion(1e-3)))
    assert "only=" not in str(caught.value)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fit(None, 10).saved is None
    assert not list(tmp_path.iterdir())


def test_accumulation_over_batches_resumes_in_the_middle(tmp_path):
    step = train.step(objective, optim.Accumulate(OPTIMIZER, 4))
    whole = fit(tmp_path / "whole", 30, step=step)
    for steps in (6, 17, 30):
        cut = fit(tmp_path / "cut", steps, step=step)
    assert not unequal_leaves(cut.state, whole.state)


def test_metrics_go_to_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    fit(tmp_path / "run", 10, loggers=[train.TensorBoard()])
    assert list((tmp_path / "run" / "tensorboard").iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "steps is 0, but must be an int of at least 1"),
        ({"steps": 10, "save_every": -1}, "save_every is -1"),
        ({"steps": 10, "evaluate_every": 0}, "evaluate_every is 0"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"steps": True}, "steps is True"),
        ({"steps": 10, "rollbacks": -1}, "rollbacks is -1"),
    ],
)
def test_invalid_step_counts_are_rejected(options, words):
    with pytest.raises(ValueError, match=words):
        fit(None, **options)


def test_a_run_is_never_overwritten(uninterrupted):
    with pytest.raises(FileExistsError, match=r"holds a run at step 40.*choose another folder"):
        fit(uninterrupted[0], 50, resume=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_waiting_for_data_loses_nothing(tmp_path, number):
    def stall(batch, generator):
        if int(batch["id"][0]) == first:
            os.kill(os.getpid(), number)
            time.sleep(1)  # a disk that does not respond
        return batch

    first = int(feed().indices(6)[0])
    with contextlib.suppress(SystemExit):
        result = fit(tmp_path / "run", 40, data=feed(map_batch=stall, workers=1, prefetch=1))
        assert result.stopped == "SIGINT"
    assert train.Checkpoints(tmp_path / "run" / "checkpoints").latest() == 6
    assert [r["step"] for r in read_records(tmp_path / "run" / "metrics.jsonl") if "loss" in r] == list(range(1, 7))


def test_curves_that_cannot_be_drawn_are_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "matplotlib")
    monkeypatch.setattr(sys, "executable", "false")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with RunFolder(tmp_path) as run:
        run.update_curves(last=True)
    assert "curves.png could not be drawn; `mlax plot" in capsys.readouterr().err


def test_numbers_of_numpy_are_taken(tmp_path):
    assert fit(tmp_path / "run", np.int64(10), save_every=np.int32(5)).step == 10
    assert json.loads((tmp_path / "run" / "config.json").read_text())["steps"] == 10


def test_the_last_plot_replaces_one_in_progress(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with RunFolder(tmp_path) as run:
        run.update_curves(every=0.0)
        under_way = run._plotting
        run.update_curves(last=True)
        assert under_way is not None and under_way.returncode is not None and under_way is not run._plotting
    assert (tmp_path / "curves.png").exists()


def test_only_evaluated_weights_can_be_the_best(tmp_path):
    fit(tmp_path / "run", 35, evaluate_every=10, save_every=5, keep=10)
    saved = train.Checkpoints(tmp_path / "run" / "checkpoints", best=train.Minimize("loss"), keep=10)
    assert saved.steps() == (5, 10, 15, 20, 25, 30, 35)
    assert saved.best() in (10, 20, 30, 35)


def test_a_rollback_restores_a_checkpoint_before_the_skipped_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect.getmodule(train.fit), "Divergence", functools.partial(Divergence, patience=4))
    data, _ = poisoned_feed(range(3, 10))
    with pytest.raises(train.Diverged):
        fit(tmp_path / "run", 100, data=data, save_every=1, evaluate=None, rollbacks=1)
    events = [r["event"] for r in read_records(tmp_path / "run" / "metrics.jsonl") if "event" in r]
    (back,) = [event for event in events if event.startswith("rolled back")]
    assert int(back.split()[-1]) <= 3


def test_fit_takes_an_iterable_feed(tmp_path):
    def made():
        return iter([{name: array[i : i + 8] for name, array in arrays(40).items()} for i in range(0, 40, 8)])

    result = fit(tmp_path / "run", 20, data=train.IterableFeed(made))
    assert result.step == 20


def test_a_run_killed_before_its_first_save_logs_no_step_twice(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 1.0}\n{"step": 3, "lo')
    fit(run, 10)
    assert [r["step"] for r in read_records(run / "metrics.jsonl") if "loss" in r] == list(range(1, 11))


def test_weights_that_cannot_be_written_are_reported_and_fit_returns(tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(files, "save", full)
    assert fit(tmp_path / "run", 10, show=True).saved == 10
    assert "could not be written" in capsys.readouterr().out


def test_the_files_of_a_finished_run_stay_unchanged(uninterrupted):
    def times():
        return {path.name: path.stat().st_mtime_ns for path in uninterrupted[0].iterdir() if path.name != "lock"}

    before = times()
    fit(uninterrupted[0], 20)
    assert times() == before


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda state: train.fit(state, STEP, feed(), steps=1), TypeError, "step is a TrainState"),
        (lambda state: train.fit(STEP, tuple(state), feed(), steps=1), TypeError, "state is a tuple"),
        (lambda state: train.fit(STEP, state, arrays(), steps=1), TypeError, "feed is a dict"),
        (lambda state: train.fit(STEP, state, feed(), steps=1, evaluate=[1]), TypeError, "evaluate is a list"),
        (
            lambda state: train.fit(STEP, state, feed(), steps=1, best=train.Minimize("loss")),
            TypeError,
            r"best=Minimize\('loss'\) is a score of an evaluation; pass evaluate=feed",
        ),
        (
            lambda state: train.fit(STEP, state, feed(), steps=1, evaluate=feed(), best="accuracy"),
            TypeError,
            r"best is 'accuracy'; write train\.Maximize\('accuracy'\)",
        ),
        (
            lambda state: train.fit(
                train.step(objective, OPTIMIZER),
                state,
                feed(),
                steps=1,
                evaluate=feed(),
                best=train.Maximize("acuracy"),
                show=False,
            ),
            KeyError,
            r"the scores are loss, accuracy; did you mean 'accuracy'\?",
        ),
    ],
)
def test_wrong_arguments_of_fit_are_rejected_with_advice(call, error, words):
    with pytest.raises(error, match=words):
        call(init_state(STEP))


def test_an_evaluation_feed_without_an_entry_of_the_batches_is_named():
    lacking = train.Feed({"x": arrays()["x"]}, batch=8)
    with pytest.raises(KeyError, match="'y'") as caught:
        train.fit(STEP, init_state(STEP), feed(), steps=1, evaluate={"valid": feed(), "test": lacking}, show=False)
    assert {"The batch has mask, x.", "This is evaluate['test'], the feed of the evaluation."} <= set(
        caught.value.__notes__
    )


def test_the_metric_of_best_is_checked_for_a_step_that_was_compiled_before():
    state = init_state(STEP)
    with feed().stream(stop=1) as batches:
        state, _ = STEP(state, next(iter(batches)))
    with pytest.raises(KeyError, match=r"best is .*, but the scores are loss, accuracy"):
        train.fit(STEP, state, feed(), steps=5, evaluate=feed(), best=train.Maximize("f1"), show=False)


def test_a_result_and_its_state_print_as_tables_in_one_line_in_tracebacks(uninterrupted):
    result = uninterrupted[1]
    first, title, header, *rows, total = str(result).splitlines()
    assert first.startswith("Fitted: step 40, saved up to step 40, ")
    assert (title, header.split()) == ("TrainState", ["path", "shape", "dtype", "bytes"])
    assert rows[0].split() == ["step", "()", "int32", "4", "bytes"]
    assert any(row.split()[:3] == ["optimizer/mean/**", "like", "trainables"] for row in rows)
    assert total.startswith(f"{len(jax.tree.leaves(result.state))} leaves, ")
    assert repr(result).startswith("Fitted(step 40, ")
    assert len(repr(result).splitlines()) == len(repr(result.state).splitlines()) == 1
    for shown in (result, result.state):
        assert "<details open>" in shown._repr_html_()
