"""The supervisor of processes that run small scripts without JAX; tests/faults injects faults into training runs."""

import inspect
import os
import signal
import threading
import time

import pytest

from mlax.cli import Supervisor, main

HEARTBEAT = """
import itertools, os, signal, sys, time
counts = itertools.count(1)
def heartbeat(step, phase):
    with open(os.environ["MLAX_HEARTBEAT"], "w") as file:
        file.write(f"{next(counts)} {step} {phase}")
"""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Run `mlax launch` with one script per process; returns the exit status."""

    def run(*scripts, restarts=1, hang=20.0, grace=30.0):
        class Scripts(Supervisor):
            def worker_args(self, index, port):
                return ["-c", HEARTBEAT + scripts[index]]

        monkeypatch.setattr(inspect.getmodule(Supervisor), "Supervisor", Scripts)
        (tmp_path / "script.py").touch()
        options = ["--restarts", str(restarts), "--hang", str(hang), "--grace", str(grace)]
        return main(["launch", "-n", str(len(scripts)), *options, str(tmp_path / "script.py")])

    return run


def messages(capfd):
    return [line.removeprefix("mlax launch: ") for line in capfd.readouterr().err.splitlines() if "launch: " in line]


def send_later(number, seconds=1.0):
    timer = threading.Timer(seconds, os.kill, (os.getpid(), number))
    timer.start()
    return timer


TRAINS = "heartbeat(1, 'step'); "
WAITS = TRAINS + "time.sleep(60)"
SAVES = "signal.signal(15, lambda *_: sys.exit(143)); "


def test_output_is_prefixed_with_the_process_index(launch, capfd):
    assert launch("print('one')", "print('two', file=sys.stderr)") == 0
    out, err = capfd.readouterr()
    assert out == "[0] one\n" and err == "[1] two\n"


def test_a_dead_process_is_reported_and_all_are_restarted(launch, capfd, tmp_path):
    once = f"{TRAINS}p = {str(tmp_path / 'once')!r}\nif not os.path.exists(p): open(p, 'w'); os.kill(os.getpid(), 9)"
    first = f"{TRAINS}time.sleep(1)"
    assert launch(first, once) == 0
    died, again = messages(capfd)
    assert died.startswith("process 1 (pid ") and died.endswith("was killed by SIGKILL, at step 1, step")
    assert again == "restarting from the last checkpoint: restart 1 of at most 1"


def test_after_the_last_restart_the_exit_status_is_that_of_the_failed_process(launch, capfd):
    assert launch(WAITS, f"{TRAINS}sys.exit(7)", restarts=1) == 7
    lines = messages(capfd)
    assert sum("exited with status 7, at step 1, step" in line for line in lines) == 2
    assert "giving up after 1 restarts" in lines[-1]


def test_a_failure_before_training_starts_is_not_retried(launch, capfd):
    assert launch(WAITS.removeprefix(TRAINS), "sys.exit(2)", restarts=3) == 2
    (lines,) = messages(capfd)
    assert "exited with status 2, before training started: not restarted" in lines


@pytest.mark.parametrize("end", ["os.abort()", "sys.exit(1)"])
def test_processes_that_fail_after_another_are_not_blamed(launch, capfd, end, tmp_path):
    sign = str(tmp_path / "sign")
    follows = f"{TRAINS}\nwhile not os.path.exists({sign!r}): time.sleep(0.05)\ntime.sleep(0.2); {end}"
    assert launch(follows, f"{TRAINS}open({sign!r}, 'w'); os._exit(3)", restarts=0) == 3
    assert messages(capfd)[0].startswith("process 1 ")


@pytest.mark.parametrize("end", ["os.abort()", "sys.exit(1)"])
def test_a_killed_process_is_blamed_even_if_another_fails_first(launch, capfd, end):
    assert launch(f"{TRAINS}{end}", f"{TRAINS}time.sleep(0.1); os.kill(os.getpid(), 9)", restarts=0) == 137
    assert messages(capfd)[0].startswith("process 1 ")


def test_a_hung_process_is_reported_and_killed(launch, capfd):
    began = time.monotonic()
    assert launch(f"{TRAINS}{WAITS}", WAITS, restarts=0, hang=1.0) == 124
    assert time.monotonic() - began < 15
    lines = messages(capfd)[0]
    assert lines.startswith("process 1 (pid ") and "furthest behind, at step 1, step; process 0 at step 1" in lines


def test_a_stopped_process_is_reported_and_killed(launch, capfd):
    assert launch(WAITS, f"{TRAINS}os.kill(os.getpid(), signal.SIGSTOP)", restarts=0, hang=1.0) == 124
    assert "has been stopped for 1 s, as by SIGSTOP" in messages(capfd)[0]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_forwarded_and_sets_the_exit_status(launch, capfd, number, status):
    timer = send_later(number)
    assert launch(SAVES + WAITS, SAVES + WAITS) == status
    timer.join()
    assert messages(capfd) == []


def test_processes_that_do_not_exit_are_killed_after_the_grace_period(launch, capfd):
    timer = send_later(signal.SIGTERM)
    began = time.monotonic()
    assert launch("signal.signal(15, signal.SIG_IGN); " + WAITS, SAVES + WAITS, grace=1.0) == 143
    timer.join()
    assert time.monotonic() - began < 10
    assert "killed before all processes had saved" in messages(capfd)[0]


def test_a_missing_script_is_reported():
    with pytest.raises(SystemExit, match=r"there is no script nowhere\.py"):
        main(["launch", "-n", "2", "nowhere.py"])
