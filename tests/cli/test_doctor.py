import inspect
import subprocess

from mlax.cli import Finding, main

_doctor = inspect.getmodule(Finding)


def test_the_doctor_reports_what_works_and_what_to_do_otherwise(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_doctor, "_check_two_processes", lambda: Finding(True, "two processes", "tested elsewhere"))
    monkeypatch.setattr(
        _doctor, "EXTRAS", {"numpy": ("arrays", "numpy"), "no-such-package": ("nothing", "'mlax[none]'")}
    )
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line[:4] in ("ok  ", "-   ") for line in lines)
    words = {line[4:32].strip(): line[:2] for line in lines}
    assert words["cpu 0"] == words["bfloat16"] == words["float64"] == words["compilation cache"] == "ok"
    assert "-   no-such-package             optional, for nothing: pip install 'mlax[none]'" in lines


def test_the_exit_status_is_1_only_if_something_needed_fails(monkeypatch):
    monkeypatch.setattr(_doctor, "_check_all", lambda: [Finding(False, "devices", "there are none")])
    assert main(["doctor"]) == 1
    monkeypatch.setattr(_doctor, "_check_all", lambda: [Finding(False, "grain", "not here", needed=False)])
    assert main(["doctor"]) == 0


def test_the_doctor_starts_processes_that_import_nothing_from_the_current_folder(monkeypatch):
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "an error")

    monkeypatch.setattr(subprocess, "run", run)
    assert not _doctor._check_two_processes().ok
    assert commands[0][1] == "-P" and "-m" not in commands[0]
