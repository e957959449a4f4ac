"""Rollbacks: after a jump of the loss, weights from before it are still there and are found."""

import errno
import itertools
import os
import sys

import pytest

from mlax import files, train
from mlax.train import read_records
from tests.faults.diverged import JumpingRun

JUMP, LATE = 20, 40


@pytest.fixture(scope="module")
def jumping():
    return JumpingRun()


@pytest.fixture(autouse=True)
def hide_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # curves take longer than the training


def rolled_back_to(run):
    events = [record["event"] for record in read_records(run / "metrics.jsonl") if "event" in record]
    return [int(event.split()[-1]) for event in events if event.startswith("rolled back")]


def weight(fitted):
    return float(fitted.state.trainables["w"])


@pytest.mark.parametrize("save_every, interrupted", [(1, False), (3, True)])
def test_the_second_rollback_restores_weights_from_before_the_jump(jumping, tmp_path, save_every, interrupted):
    options = {"jump": JUMP, "late": LATE, "keep": 2, "save_every": save_every, "show": False}
    if interrupted:  # what is known of the losses is saved, too
        jumping.fit(tmp_path, **options, steps=30)
    fitted = jumping.fit(tmp_path, **options, steps=70)
    first, second = rolled_back_to(tmp_path)
    assert JUMP < first <= LATE and second <= JUMP
    assert abs(weight(fitted) - 2) < 0.1


def test_a_damaged_checkpoint_is_passed_over_by_a_rollback(jumping, tmp_path, monkeypatch, capsys):
    real = train.Checkpoints.restore

    def damaged(self, target, *, step=None, **options):
        if step is not None and step > JUMP:
            raise files.InvalidFile(f"step {step} is damaged")
        return real(self, target, step=step, **options)

    monkeypatch.setattr(train.Checkpoints, "restore", damaged)
    fitted = jumping.fit(tmp_path, jump=JUMP, late=LATE, keep=2, save_every=3, steps=70)
    assert abs(weight(fitted) - 2) < 0.1 and len(rolled_back_to(tmp_path)) == 1
    assert "cannot be restored: step 39 is damaged" in capsys.readouterr().out


def test_a_folder_that_cannot_be_listed_for_a_while_does_not_end_training(jumping, tmp_path, monkeypatch, capsys):
    real, calls = os.listdir, itertools.count()

    def failing(path):
        if "checkpoints" in str(path) and 20 < next(calls) < 40:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", failing)
    fitted = jumping.fit(tmp_path, jump=1000, late=1000, keep=2, save_every=3, steps=60)
    assert fitted.step == fitted.saved == 60 and next(calls) > 40
    assert "Input/output error" in "".join(capsys.readouterr())
