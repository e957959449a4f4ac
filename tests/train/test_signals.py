"""Signals: what a busy process does when it is told to end. tests/faults sends them to whole trainings."""

import math
import os
import signal
import time

import pytest

from mlax import train
from mlax.train import Signals, default_grace, read_records
from tests.train.tasks import feed
from tests.train.test_fit import fit, hide_matplotlib  # noqa: F401


@pytest.fixture
def exits(monkeypatch):
    """The statuses with which the process would have exited."""
    statuses = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    return statuses


def wait_for(exits, seconds=5.0):
    end = time.monotonic() + seconds
    while not exits and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_does_not_learn_of_its_end_exits_after_the_grace_period(exits, capfd, number):
    with Signals(grace=0.2):
        began = time.monotonic()
        os.kill(os.getpid(), number)
        wait_for(exits)
        assert time.monotonic() - began > 0.15
    assert exits[0] == 128 + number
    assert f"{number.name} while in a call longer than the grace period of 0.2 s" in capfd.readouterr().err


def test_a_loop_that_knows_of_its_end_takes_as_long_as_it_needs(exits):
    with Signals(grace=0.1) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.pending() == "SIGTERM"
        time.sleep(0.4)
    assert not exits


def test_the_grace_period_does_not_run_during_a_save(exits):
    with Signals(grace=0.1) as signals:
        with signals.unkillable():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.4)
        assert signals.pending() == "SIGTERM"
    assert not exits


def test_a_compilation_ends_at_once(exits, capfd):
    with Signals(grace=60) as signals, signals.killable():
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(exits)
    assert exits[0] == 143 and "SIGTERM while compiling" in capfd.readouterr().err


def test_ctrl_c_is_answered_while_compiling_and_the_second_one_quits(exits, capfd):
    def press_twice():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        assert "press Ctrl-C again to quit at once" in capfd.readouterr().err
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    with Signals() as signals, signals.killable():
        try:
            press_twice()
        except KeyboardInterrupt:  # a compilation would not let it through
            wait_for(exits)
    assert exits[0] == 130


def test_an_ignored_hangup_stays_ignored(exits):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with Signals(grace=0.0) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.1)
            assert signals.pending() == ""
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and not exits
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, 8),
        ({"SLURM_JOB_ID": "7"}, 28),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1120"}, 118),  # --signal=TERM@120
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "90000"}, 28),  # scancel
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "990"}, 28),  # past the limit
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "soon"}, 28),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 28),
        ({"MLAX_HEARTBEAT": "/dev/fd/7", "SLURM_JOB_ID": "7"}, math.inf),  # `mlax launch --grace`
    ],
)
def test_the_grace_period_is_that_of_the_cluster(environment, seconds):
    assert default_grace(environment, now=1000.0) == seconds


def slow_disk(monkeypatch, number):
    """Make each fsync slow, and send a signal in the first."""
    fsync, calls = os.fsync, []

    def slow(descriptor):
        calls.append(1)
        if len(calls) == 3:  # in the first checkpoint
            os.kill(os.getpid(), number)
        time.sleep(0.08)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_save_that_takes_longer_than_the_grace_period_is_finished(tmp_path, monkeypatch, exits, number):
    slow_disk(monkeypatch, number)
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path / "run", 400, save_every=2, evaluate_every=400, grace=0.2)
    assert ended.value.code == 128 + number and not exits
    monkeypatch.undo()
    saved = train.Checkpoints(tmp_path / "run" / "checkpoints").latest()
    logged = [r["step"] for r in read_records(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    assert logged == list(range(1, saved + 1))


@pytest.mark.parametrize("grace", [-1, float("nan"), "8", True])
def test_an_impossible_grace_period_is_refused(grace):
    with pytest.raises(ValueError, match=r"grace is .*, but must be a number of seconds"):
        fit(None, 10, grace=grace)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("I/O operation on closed file")])
def test_a_terminal_that_is_gone_does_not_prevent_the_save(tmp_path, monkeypatch, error):
    def hang_up(batch, generator):
        if int(batch["id"][0]) == first:
            os.kill(os.getpid(), signal.SIGHUP)
        return batch

    def closed(*args, **options):
        raise error

    first = int(feed().indices(5)[0])
    data = feed(map_batch=hang_up, prefetch=1)
    monkeypatch.setattr("builtins.print", closed)
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path / "run", 40, data=data, show=True)
    assert ended.value.code == 129
    assert train.Checkpoints(tmp_path / "run" / "checkpoints").latest() >= 4
