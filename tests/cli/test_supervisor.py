"""The supervisor of processes that run small scripts without JAX; tests/faults injects faults into training runs."""

import inspect
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from mlax.cli import Supervisor, main
from tests.processes import child_environment

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


@pytest.mark.parametrize("end", ["os.abort()", "sys.exit(1)"])
def test_a_process_that_exits_with_status_0_before_its_end_is_blamed(launch, capfd, end):
    follows = f"{TRAINS}time.sleep(0.8); {end}"
    assert launch(follows, f"{TRAINS}os._exit(0)", restarts=0) != 0
    words = messages(capfd)[0]
    assert words.startswith("process 1 ") and "exited with status 0 before its script had ended, at step 1" in words


def test_a_process_that_exits_with_status_0_is_blamed_for_those_that_wait_for_it(launch, capfd):
    assert launch(WAITS, f"{TRAINS}os._exit(0)", restarts=0, hang=1.0) == 124
    words = messages(capfd)[0]
    assert words.startswith("process 1 ") and "process 0" in words and "waits for it" in words


def test_processes_learn_when_the_scripts_of_all_have_ended(launch):
    ends = """
report = os.open(os.environ["MLAX_HEARTBEAT"], os.O_RDWR)
time.sleep({seconds})
os.pwrite(report, b"1", 64)
began = time.monotonic()
while os.pread(report, 1, 65) != b"1" and time.monotonic() - began < 20: time.sleep(0.02)
sys.exit(0 if {least} < time.monotonic() - began < 15 else 5)
"""
    assert launch(ends.format(seconds=0, least=0.3), ends.format(seconds=0.7, least=0), restarts=0) == 0


def test_output_without_line_ends_is_not_held_back(launch, capfd):
    assert launch("print('x' * 300_000, end='', flush=True); time.sleep(0.1); print('y')") == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 5 and sum(line.count("x") for line in lines) == 300_000
    assert max(map(len, lines)) < 70_000 and lines[-1].endswith("y")


def test_a_supervisor_needs_no_files_that_it_could_leave_behind(launch, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    assert launch(f"{TRAINS}sys.exit(len(os.listdir({str(tmp_path / 'temporary')!r})))", restarts=0) == 0


LISTENS = """
import glob, os, re
mine = {re.sub(r"\\D", "", os.readlink(link)) for link in glob.glob("/proc/self/fd/*") if os.path.islink(link)}
for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    for fields in map(str.split, open(table).read().splitlines()[1:]):
        if fields[3] == "0A" and fields[9] in mine:
            print("listens", fields[1].split(":")[0])
"""


def test_workers_listen_on_the_loopback_address_only_and_import_nothing_from_the_current_folder(tmp_path):
    for name in ("ctypes", "json", "faulthandler"):
        (tmp_path / f"{name}.py").write_text(f"print('imported {name}')\nraise SystemExit(9)\n")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "script.py").write_text(LISTENS)
    command = [sys.executable, "-P", "-m", "mlax", "launch", "-n", "1", "--restarts", "0", "scripts/script.py"]
    environment = {**child_environment(), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    addresses = {line.split()[-1] for line in done.stdout.splitlines()}
    assert addresses and all(each.endswith("0100007F") for each in addresses), done.stdout


def test_a_hung_process_is_reported_and_killed(launch, capfd):
    began = time.monotonic()
    assert launch(f"{TRAINS}{WAITS}", WAITS, restarts=0, hang=1.0) == 124
    assert time.monotonic() - began < 15
    lines = messages(capfd)[0]
    assert lines.startswith("process 1 (pid ") and "furthest behind, at step 1, step; process 0 at step 1" in lines


def test_a_stopped_process_is_reported_and_killed(launch, capfd):
    assert launch(WAITS, f"{TRAINS}os.kill(os.getpid(), signal.SIGSTOP)", restarts=0, hang=1.0) == 124
    assert "has been stopped for 1 s, as by SIGSTOP" in messages(capfd)[0]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
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
