"""The folder of a run: its lock, logs that are not regular files; and feeds that are none."""

import errno
import fcntl
import os

import pytest

from mlax import files, train
from mlax.train import MetricsLog, RunFolder, truncate_log
from tests.train.tasks import OPTIMIZER, feed, init_state, objective


def test_a_second_process_cannot_enter_the_folder_until_the_first_leaves_it(tmp_path):
    with RunFolder(tmp_path), pytest.raises(RuntimeError, match="another process is training in"), RunFolder(tmp_path):
        pass
    with RunFolder(tmp_path):
        pass


def test_a_file_system_without_locks_is_not_taken_for_another_process(tmp_path, monkeypatch, capsys):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with RunFolder(tmp_path):
        assert "cannot be locked (No locks available)" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["a symbolic link", "a FIFO", "a device", "a folder"])
def test_a_lock_or_a_log_that_is_not_a_regular_file_is_refused(kind, tmp_path, capfd):
    target = tmp_path / "target"
    target.write_text("precious\n")

    def make(path):
        if kind == "a symbolic link":
            path.symlink_to(target)
        elif kind == "a FIFO":
            os.mkfifo(path)
        elif kind == "a folder":
            path.mkdir()
        else:
            os.mknod(path, 0o020600, os.makedev(1, 3))

    try:
        make(tmp_path / "lock")
        make(tmp_path / "metrics.jsonl")
    except PermissionError:
        pytest.skip("only root makes devices")
    with pytest.raises(files.InvalidFile, match=f"lock: it is {kind}, not a regular file"), RunFolder(tmp_path):
        pass
    with pytest.raises(files.InvalidFile, match=f"metrics.jsonl: it is {kind}"):
        truncate_log(tmp_path / "metrics.jsonl", 0)
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"step": 1})
    log.flush()  # training goes on
    assert f"it is {kind}" in capfd.readouterr().err
    assert target.read_text() == "precious\n"


def test_fit_on_a_generator_names_the_feed_that_takes_one(tmp_path):
    step = train.step(objective, OPTIMIZER)
    for name in ("feed", "evaluate"):
        feeds = {"feed": feed(), "evaluate": None} | {name: (batch for batch in ())}
        with pytest.raises(TypeError, match=rf"fit: {name} is a generator.*train\.IterableFeed\(make\)"):
            train.fit(step, init_state(step), feeds["feed"], evaluate=feeds["evaluate"], steps=1)


def test_files_that_a_killed_process_was_writing_are_removed_by_the_next_run_alone(tmp_path):
    unfinished, other = ".last.safetensors.0123456789abcdef", (".hidden", ".config.json.bak", "metrics.jsonl")
    for name in (unfinished, *other):
        (tmp_path / name).write_text("x")
    with RunFolder(tmp_path):
        assert sorted(os.listdir(tmp_path)) == sorted(["lock", *other])
        (tmp_path / unfinished).write_text("being written")
        with pytest.raises(RuntimeError, match="another process"), RunFolder(tmp_path):
            pass
        assert (tmp_path / unfinished).exists()
