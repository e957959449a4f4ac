"""Resuming: only the same experiment is continued, and what signals and damaged files took away is made up."""

import inspect
import json
import os
import random
import re
import shutil
import signal
import sys
from pathlib import Path

import jax
import pytest

from mlax import files, nn, train
from mlax.core import replace
from mlax.train import RunFolder, compare_config, read_records, truncate_log
from tests.asserts import unequal_leaves
from tests.train.tasks import MODEL, OPTIMIZER, arrays, feed, init_state, objective
from tests.train.test_fit import STEP, fit, hide_matplotlib  # noqa: F401

EVALUATION = arrays(30, seed=1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 10 steps, and its result."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        return run, fit(run, 10)


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


def make_objective(model, weight=1.0):
    def weighted(batch, trainables, non_trainables, rng=None, inference_mode=False):
        values, new = objective(batch, trainables, non_trainables, rng, inference_mode, model)
        return {**values, "loss": weight * values["loss"]}, new

    return weighted


def double(batch, generator):
    return {**batch, "x": batch["x"] * 2}


ALIKE = train.step(make_objective(MODEL), OPTIMIZER)


def another_experiment(part):
    """The step, state, feed and evaluation of a run with one part changed."""
    step, state, data, test = ALIKE, init_state(ALIKE), feed(map_batch=double), train.Feed(EVALUATION, batch=8)
    if part == "the key of the state":
        state = state._replace(rng=jax.random.key(7))
    elif part == "the first weights":
        state = init_state(ALIKE, seed=1)._replace(rng=state.rng)
    elif part == "the data":
        data = train.Feed({**arrays(), "x": arrays(seed=5)["x"]}, batch=8, seed=0, map_batch=double)
    elif part == "the data of evaluations":
        test = train.Feed(arrays(30, seed=2), batch=8)
    elif part == "map_batch of the feed":
        data = feed(map_batch=lambda batch, generator: {**batch, "x": batch["x"] * 3})
    elif part == "the objective: model":
        step = train.step(make_objective(replace(MODEL, "drop", nn.Dropout(0.2))), OPTIMIZER)
    elif part == "the objective: weight":
        step = train.step(make_objective(MODEL, 2.0), OPTIMIZER)
    return step, state, data, test


def continue_run(run, part="", *, steps=10, **options):
    step, state, data, test = another_experiment(part)
    return train.fit(step, state, data, steps=steps, run=run, evaluate=test, show=False, **options)


@pytest.fixture(scope="module")
def alike(tmp_path_factory):
    """A finished run of the experiment without changes, whose feed has a map_batch."""
    run = tmp_path_factory.mktemp("runs") / "alike"
    doubled = feed(map_batch=double)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        result = train.fit(
            ALIKE, init_state(ALIKE), doubled, steps=10, run=run, evaluate=train.Feed(EVALUATION, batch=8), show=False
        )
    return run, result


@pytest.mark.parametrize("steps", [10, 20])  # the run is finished, or goes on
@pytest.mark.parametrize(
    "part",
    [
        "the key of the state",
        "the first weights",
        "the data",
        "the data of evaluations",
        "map_batch of the feed",
        "the objective: model",
        "the objective: weight",
    ],
)
def test_another_experiment_is_refused_with_what_differs(alike, part, steps):
    with pytest.raises(
        ValueError, match=r'holds a .*another configuration.*resume="anyway".*resume="restart"'
    ) as error:
        continue_run(alike[0], part, steps=steps)
    listed = str(error.value).partition("(")[2].partition(");")[0]
    assert listed.startswith(f"{part} ") and ";" not in listed
    if part == "the objective: model":
        assert "Dropout(rate=0.1)" in listed and "Dropout(rate=0.2)" in listed and "head=Linear" not in listed
    if part == "the objective: weight":
        assert "was 1.0 and is now 2.0" in listed


def test_the_same_experiment_in_other_words_is_continued(alike):
    def weighted(batch, trainables, non_trainables, rng=None, inference_mode=False):
        """A docstring, a comment and other lines."""
        # of the same program
        values, new = objective(batch, trainables, non_trainables, rng, inference_mode, model)
        return {**values, "loss": weight * values["loss"]}, new

    model, weight = replace(MODEL, "drop", nn.Dropout(0.1)), 1.0
    doubled = feed(map_batch=double)
    weighted.__qualname__ = "make_objective.<locals>.weighted"
    step = train.step(weighted, OPTIMIZER)
    test = train.Feed({name: array.copy() for name, array in EVALUATION.items()}, batch=8)
    result = train.fit(step, init_state(step), doubled, steps=10, run=alike[0], evaluate=test, show=False)
    assert not unequal_leaves(result.state, alike[1].state)


def test_another_experiment_is_continued_if_told_to_and_reported(copied, capsys):
    state = init_state(STEP)._replace(rng=jax.random.key(7))
    test = train.Feed(arrays(30, seed=2), batch=8)
    before = fit(copied, 10).scores
    result = train.fit(STEP, state, feed(), steps=10, run=copied, evaluate=test, show=False, resume="anyway")
    assert result.scores != before, "the old scores are of other data"
    words = capsys.readouterr().err
    assert "changed since this run started: the key of the state was" in words
    assert "changed since this run started: the data of evaluations have changed" in words
    assert fit(copied, 20, resume="anyway").step == 20


def test_a_map_that_is_added_to_the_feed_is_reported(copied, capsys):
    result = fit(copied, 12, data=feed(map_batch=lambda batch, generator: batch))
    assert result.step == 12
    assert "changed since this run started: map_batch of the feed was none and is now code" in capsys.readouterr().err


def test_a_state_that_was_refused_can_still_be_used(alike):
    step, state, data, test = another_experiment("the key of the state")
    with pytest.raises(ValueError, match="another configuration"):
        train.fit(step, state, data, steps=20, run=alike[0], evaluate=test, show=False)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_training_goes_on_with_the_state_of_a_result(copied):
    first = fit(copied, 10)
    test = train.Feed(EVALUATION, batch=8)
    second = train.fit(STEP, first.state, feed(), steps=12, run=copied, evaluate=test, show=False)
    assert second.step == 12
    other = init_state(STEP, seed=1)._replace(rng=jax.random.clone(second.state.rng))
    with pytest.raises(ValueError, match="the first weights"):  # which are still known
        train.fit(STEP, other, feed(), steps=14, run=copied, evaluate=test, show=False)


def test_restart_moves_the_old_run_aside_and_starts_over(copied, finished, capsys):
    before = {path.name for path in copied.iterdir()}
    result = fit(copied, 7, resume="restart")
    assert result.step == 7 and train.Checkpoints(copied / "checkpoints").steps() == (7,)
    aside = copied.with_name("run-before-1")
    assert {path.name for path in aside.iterdir()} == before
    assert f"is now in {aside}" in capsys.readouterr().err
    assert not unequal_leaves(fit(aside, 10).state, finished[1].state)
    fit(copied, 7, resume="restart")
    assert copied.with_name("run-before-2").is_dir()
    assert fit(copied.with_name("new"), 7, resume="restart").step == 7, "there need not be a run"
    copied.with_name("link").symlink_to(copied)
    fit(copied.with_name("link"), 7, resume="restart")
    assert copied.with_name("link").is_symlink() and copied.with_name("run-before-3").is_dir()


@pytest.mark.parametrize("resume", ["", "yes", None, 2])
def test_other_words_for_resume_are_refused(resume):
    with pytest.raises(ValueError, match='must be True, False, "anyway" or "restart"'):
        fit(None, 10, resume=resume)


def test_a_run_folder_that_exists_is_refused_with_the_way_to_start_over(finished):
    with pytest.raises(FileExistsError, match=r'resume="restart" to move this one aside'):
        fit(finished[0], 20, resume=False)


def flip_bit(path, draws):
    data = bytearray(path.read_bytes())
    data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
    path.write_bytes(data)


def test_no_flipped_bit_in_the_log_or_the_configuration_blocks_resuming(copied, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # which takes most of the time
    config = json.loads((copied / "config.json").read_text())
    draws = random.Random(0)
    for name in ("metrics.jsonl", "config.json"):
        whole = (copied / name).read_bytes()
        for _ in range(60):
            (copied / name).write_bytes(whole)
            flip_bit(copied / name, draws)
            truncate_log(copied / "metrics.jsonl", 10)
            assert len(read_records(copied / "metrics.jsonl")) >= 8
            RunFolder(copied).write_report("title", {})
            compare_config(RunFolder(copied), config)


def test_damage_in_what_is_only_written_is_replaced(copied):
    for name in ("report.md", "last.safetensors", "best.safetensors", "curves.png"):
        (copied / name).write_bytes(b"\xff")
    fit(copied, 12)
    assert "| 12 |" in (copied / "report.md").read_text()
    assert all(files.load(copied / f"{name}.safetensors") for name in ("last", "best"))


def test_damaged_lines_of_a_log_are_dropped_with_a_warning(copied, capsys):
    log = copied / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    damaged = [
        b'{"step": 3, "loss": \xff1.0}\n',
        b'{"stfp": 3}\n',
        b"[" * 5000 + b"\n",
        b'{"step": 3, "evaluation": 1}\n',
        b"7\n",
    ]
    log.write_bytes(b"".join([*lines[:3], *damaged, *lines[3:]]))
    assert len(read_records(log)) == len(lines)
    assert fit(copied, 12).step == 12
    assert "metrics.jsonl: 5 damaged lines are left out" in capsys.readouterr().err
    assert [r["step"] for r in map(json.loads, log.read_text().splitlines()) if "loss" in r] == list(range(1, 13))


def test_a_config_that_cannot_be_read_counts_as_absent_and_is_reported(copied, capsys):
    for damage in (b"", b"\xff\xfe", b"[1]", b'{"steps": 10, "step', b'{"fingerprint": 3}'):
        (copied / "config.json").write_bytes(damage)
        changes = compare_config(RunFolder(copied), {"fingerprint": {}})
        assert not changes.refused and bool(changes.fault) != damage.startswith(b'{"fi')
    (copied / "config.json").write_bytes(b"\xff")
    assert fit(copied, 10).step == 10
    assert "config.json: its JSON cannot be parsed" in capsys.readouterr().err
    (copied / "config.json").unlink()
    fit(copied, 10)
    assert "config.json: there is no such file" in capsys.readouterr().err
    fit(copied.with_name("new"), 10)
    assert capsys.readouterr().err == "", "a new run has none"


def test_a_long_log_is_read_from_its_end(tmp_path, monkeypatch):
    log, parsed = tmp_path / "metrics.jsonl", []
    lines = [json.dumps({"step": step, "loss": 1 / step, "text": "x" * 50}) + "\n" for step in range(1, 20_001)]
    log.write_text("".join(lines) + '{"step": 20001, "lo')
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(1) or loads(text))
    monkeypatch.setattr(inspect.getmodule(truncate_log), "SHORT_LOG_BYTES", 0)
    truncate_log(log, 19_500)
    assert len(parsed) < 600
    assert log.read_text() == "".join(lines[:19_500])
    parsed.clear()
    found = read_records(log, most=100)
    assert len(parsed) < 210 and found[0]["step"] == 1 and found[-1]["step"] == 19_500


def test_the_log_is_cut_where_the_number_of_a_later_step_is_damaged(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text(
        "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in [*range(1, 30), 3, *range(31, 40)])
    )
    truncate_log(log, 20)
    assert [r["step"] for r in read_records(log)] == list(range(1, 21))


def interrupted_evaluation(number, which):
    """A feed for evaluations that sends a signal when one of them begins."""
    made, begun = train.Feed(EVALUATION, batch=8), []

    def epoch(**options):
        begun.append(1)
        if len(begun) == which:
            os.kill(os.getpid(), number)
        return type(made).epoch(made, **options)

    made.epoch = epoch
    return made


@pytest.fixture(scope="module")
def scores_after_20(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        return fit(run, 20).scores


@pytest.mark.parametrize(("number", "which"), [(signal.SIGTERM, 1), (signal.SIGHUP, 1), (signal.SIGTERM, 2)])
def test_an_interrupted_evaluation_is_made_up_by_the_same_command(tmp_path, capsys, scores_after_20, number, which):
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        fit(run, 20, evaluate=interrupted_evaluation(number, which), show=True)
    assert ended.value.code == 128 + number
    words = f"stopped by {number.name} in the evaluation after step {10 * which} of 20; resume with"
    assert words in capsys.readouterr().out
    for _ in range(2):
        result = fit(run, 20)
        assert result.scores == scores_after_20 and result.stopped == "" and result.saved == 20
    assert [r["step"] for r in read_records(run / "metrics.jsonl") if "evaluation" in r] == [10, 20]
    saved = train.Checkpoints(run / "checkpoints").restore(init_state(STEP))
    assert {name: saved.metrics[name] for name in scores_after_20} == scores_after_20, "they count for the best too"


def test_ctrl_c_in_the_last_evaluation_returns_with_the_signal(tmp_path, scores_after_20):
    result = fit(tmp_path / "run", 20, evaluate=interrupted_evaluation(signal.SIGINT, 2))
    assert result.stopped == "SIGINT" and result.saved == 20 and result.scores != scores_after_20
    assert fit(tmp_path / "run", 20).scores == scores_after_20


def test_the_best_evaluation_is_saved_even_if_no_checkpoint_is_due(tmp_path):
    run = tmp_path / "run"
    fit(run, 30, evaluate_every=5, save_every=30, keep=1)
    scores = {r["step"]: r["evaluation"]["loss"] for r in read_records(run / "metrics.jsonl") if "evaluation" in r}
    best = min(scores, key=scores.get)
    saved = train.Checkpoints(run / "checkpoints", best=train.Minimize("loss"), keep=1)
    assert saved.best() == best
    state = saved.restore(init_state(STEP), step=best).tree
    assert not unequal_leaves(files.load(run / "best.safetensors")["trainables"], jax.device_get(state.trainables))


def test_another_criterion_of_the_best_forgets_the_best_so_far(tmp_path, monkeypatch):
    save, saved = train.Checkpoints.save, []
    monkeypatch.setattr(
        train.Checkpoints,
        "save",
        lambda self, step, *args, **rest: saved.append(step) or save(self, step, *args, **rest),
    )
    fit(tmp_path / "run", 10, best=train.Maximize("accuracy"))  # below every loss
    fit(tmp_path / "run", 20, evaluate_every=2, save_every=20)
    assert saved[:2] == [10, 12]


def test_a_failed_save_is_reported_even_if_nothing_is_shown(tmp_path, monkeypatch, capsys):
    def full(*args, **options):
        raise OSError("no space left on device")

    monkeypatch.setattr(inspect.getmodule(train.Checkpoints), "write_checkpoint", full)
    assert fit(tmp_path / "run", 10).saved is None
    assert re.search(r"save failed.*: no space left on device", capsys.readouterr().err)


def test_a_checkpoint_folder_that_cannot_be_read_at_the_end_loses_nothing(tmp_path, monkeypatch, capsys):
    save = train.Checkpoints.save

    def break_after(self, *args, **options):
        save(self, *args, **options)
        self.wait()
        for name in ("latest", "best"):
            monkeypatch.setattr(train.Checkpoints, name, lambda self: (_ for _ in ()).throw(OSError("stale handle")))

    monkeypatch.setattr(train.Checkpoints, "save", break_after)
    result = fit(tmp_path / "run", 10)
    assert result.step == 10 and result.saved is None and result.scores
    assert "the checkpoints cannot be read: stale handle" in capsys.readouterr().err
    left = files.load(tmp_path / "run" / "last.safetensors")["trainables"]
    assert not unequal_leaves(left, jax.device_get(result.state.trainables))


def test_skipped_steps_are_counted_in_the_last_line_and_the_report_has_four_digits(tmp_path, capsys):
    bad = set(feed().indices(3).tolist())

    def poison(batch, generator):
        x = batch["x"].copy()
        x[[i in bad for i in batch["id"].tolist()]] = float("nan")
        return {**batch, "x": x}

    fit(tmp_path / "run", 10, data=feed(map_batch=poison), show=True)
    assert "finished: 10 of 10 steps, 1 of them skipped, as they were not finite  " in capsys.readouterr().out
    report = (tmp_path / "run" / "report.md").read_text()
    assert "- **skipped**: 1 steps" in report
    (loss,) = [line for line in report.splitlines() if line.startswith("- **loss**")]
    assert len(loss.partition(": ")[2]) <= 6
