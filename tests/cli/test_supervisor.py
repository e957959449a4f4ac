"""The supervisor over processes that are small scripts without JAX; the faults of trainings are in tests/faults."""

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
    """Run `mlax launch`, each process a script of its own; gives the exit status."""

    def launched(*scripts, restarts=1, hang=20.0, grace=30.0):
        class Scripts(Supervisor):
            def worker_args(self, index, port):
                return ["-c", HEARTBEAT + scripts[index]]

        monkeypatch.setattr(inspect.getmodule(Supervisor), "Supervisor", Scripts)
        (tmp_path / "script.py").touch()
        options = ["--restarts", str(restarts), "--hang", str(hang), "--grace", str(grace)]
        return main(["launch", "-n", str(len(scripts)), *options, str(tmp_path / "script.py")])

    return launched


def said(capfd):
    return [line.removeprefix("mlax launch: ") for line in capfd.readouterr().err.splitlines() if "launch: " in line]


def soon(number, seconds=1.0):
    timer = threading.Timer(seconds, os.kill, (os.getpid(), number))
    timer.start()
    return timer


TRAINS = "heartbeat(1, 'step'); "
WAITS = TRAINS + "time.sleep(60)"
SAVES = "signal.signal(15, lambda *_: sys.exit(143)); "


def test_output_has_the_number_of_its_process(launch, capfd):
    assert launch("print('one')", "print('two', file=sys.stderr)") == 0
    out, err = capfd.readouterr()
    assert out == "[0] one\n" and err == "[1] two\n"


def test_a_dead_process_is_named_and_all_begin_again(launch, capfd, tmp_path):
    once = f"{TRAINS}p = {str(tmp_path / 'once')!r}\nif not os.path.exists(p): open(p, 'w'); os.kill(os.getpid(), 9)"
    first = f"{TRAINS}time.sleep(1)"
    assert launch(first, once) == 0
    died, again = said(capfd)
    assert died.startswith("process 1 (pid ") and died.endswith("was killed by SIGKILL, at step 1, step")
    assert again == "restarting from the last checkpoint: restart 1 of at most 1"


def test_after_the_last_restart_the_status_is_that_of_the_culprit(launch, capfd):
    assert launch(WAITS, f"{TRAINS}sys.exit(7)", restarts=1) == 7
    words = said(capfd)
    assert sum("exited with status 7, at step 1, step" in line for line in words) == 2
    assert "giving up after 1 restarts" in words[-1]


def test_what_fails_before_training_began_is_not_tried_again(launch, capfd):
    assert launch(WAITS.removeprefix(TRAINS), "sys.exit(2)", restarts=3) == 2
    (words,) = said(capfd)
    assert "exited with status 2, before training started: not restarted" in words


@pytest.mark.parametrize("end", ["os.abort()", "sys.exit(1)"])
def test_those_who_fail_after_another_are_not_blamed(launch, capfd, end, tmp_path):
    sign = str(tmp_path / "sign")
    follows = f"{TRAINS}\nwhile not os.path.exists({sign!r}): time.sleep(0.05)\ntime.sleep(0.2); {end}"
    assert launch(follows, f"{TRAINS}open({sign!r}, 'w'); os._exit(3)", restarts=0) == 3
    assert said(capfd)[0].startswith("process 1 ")


@pytest.mark.parametrize("end", ["os.abort()", "sys.exit(1)"])
def test_whoever_is_killed_is_to_blame_though_another_fails_of_it(launch, capfd, end):
    assert launch(f"{TRAINS}{end}", f"{TRAINS}time.sleep(0.1); os.kill(os.getpid(), 9)", restarts=0) == 137
    assert said(capfd)[0].startswith("process 1 ")


def test_a_hung_process_is_named_and_ended(launch, capfd):
    began = time.monotonic()
    assert launch(f"{TRAINS}{WAITS}", WAITS, restarts=0, hang=1.0) == 124
    assert time.monotonic() - began < 15
    words = said(capfd)[0]
    assert words.startswith("process 1 (pid ") and "furthest behind, at step 1, step; process 0 at step 1" in words


def test_a_stopped_process_is_named_and_ended(launch, capfd):
    assert launch(WAITS, f"{TRAINS}os.kill(os.getpid(), signal.SIGSTOP)", restarts=0, hang=1.0) == 124
    assert "has been stopped for 1 s, as by SIGSTOP" in said(capfd)[0]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_passed_on_and_the_status_says_so(launch, capfd, number, status):
    timer = soon(number)
    assert launch(SAVES + WAITS, SAVES + WAITS) == status
    timer.join()
    assert said(capfd) == []


def test_processes_that_do_not_end_are_killed_after_the_grace(launch, capfd):
    timer = soon(signal.SIGTERM)
    began = time.monotonic()
    assert launch("signal.signal(15, signal.SIG_IGN); " + WAITS, SAVES + WAITS, grace=1.0) == 143
    timer.join()
    assert time.monotonic() - began < 10
    assert "killed before all processes had saved" in said(capfd)[0]


def test_a_script_that_is_not_there_is_named():
    with pytest.raises(SystemExit, match=r"there is no script nowhere\.py"):
        main(["launch", "-n", "2", "nowhere.py"])
