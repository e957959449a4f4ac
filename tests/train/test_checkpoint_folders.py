"""The folder of checkpoints: who may delete what, what retention keeps, what is not a step, and errors of the disk."""

import errno
import fcntl
import inspect
import json
import os
import shutil
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from mlax import files, train
from mlax.train.checkpoints import encode_manifest, hash_bytes, read_manifest, write_checkpoint
from tests.asserts import unequal_leaves

LEFTOVERS = (".saving-00000002-host-1-5-ab-1", ".removing-00000001-2-ab", ".failed-00000002-host-1-ab-1")


def tree(step):
    return {"x": np.full(3, step), "y": {"z": np.arange(4.0) * step}}


def save(checkpoints, *steps, **more):
    for step in steps:
        checkpoints.save(step, tree(step), **more)
        checkpoints.wait()


def assert_step(checkpoints, step):
    restored = checkpoints.restore(tree(0))
    assert restored.step == step and not unequal_leaves(restored.tree, tree(step))


@pytest.fixture
def reports():
    return []


@pytest.fixture
def checkpoints(tmp_path, reports):
    return train.Checkpoints(tmp_path / "checkpoints", report=reports.append)


# Labels


def test_a_block_is_never_stored_under_the_name_of_another_array(tmp_path):
    """An array in blocks of 5, 5 and 2 elements, of which the last leaves space for one that is called like it."""
    for name in ("3@0", "0@10"):
        values = {"0": np.arange(12.0), name: np.full(2, 7.0)}
        checkpoints = train.Checkpoints(tmp_path / name, file_bytes=40)
        checkpoints.save(1, values)
        checkpoints.wait()
        assert len(os.listdir(tmp_path / name / "step-00000001")) == 4  # three files and the manifest
        assert not unequal_leaves(checkpoints.restore(values).tree, values)


def test_an_array_in_two_shards_beside_one_named_as_a_shard_round_trips(tmp_path):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    values = {
        "w": jax.device_put(np.arange(8, dtype=np.float32).reshape(4, 2), over),
        **{name: np.full((2, 2), 9, np.float32) for name in ("w@0,0", "w@2,0", "1@w", "2@w")},
    }
    checkpoints = train.Checkpoints(tmp_path)
    checkpoints.save(1, values)
    checkpoints.wait()
    assert not unequal_leaves(checkpoints.restore(values).tree, values)


def forge(folder, change):
    """Change the manifest in a step's folder, with a hash that matches."""
    path = Path(folder, "manifest.json")
    fields = json.loads(path.read_text())
    del fields["xxh3_128"]
    change(fields)
    rest = '",' + json.dumps(fields)[1:]
    path.write_bytes(b'{"xxh3_128": "' + hash_bytes(rest.encode()).encode() + rest.encode())


def test_a_manifest_that_stores_two_pieces_under_one_label_is_refused(checkpoints):
    save(checkpoints, 1)

    def overwrite(fields):
        fields["arrays"]["x"]["pieces"][0]["name"] = "y/z"

    forge(f"{checkpoints.folder}/step-00000001", overwrite)
    with pytest.raises(files.InvalidFile, match="two pieces are stored as 'y/z'"):
        checkpoints.restore(tree(0), step=1)


def test_booleans_that_are_neither_0_nor_1_are_refused(tmp_path):
    checkpoints = train.Checkpoints(tmp_path)
    checkpoints.save(1, {"mask": np.full(4, 7, np.uint8)})
    checkpoints.wait()

    def retype(fields):
        fields["arrays"]["mask"]["dtype"] = "bool"

    forge(tmp_path / "step-00000001", retype)
    with pytest.raises(files.InvalidFile, match="'mask' is boolean, but is not made of 0 and 1"):
        checkpoints.restore({"mask": np.zeros(4, bool)}, step=1)


def test_a_manifest_of_900_axes_is_refused(checkpoints):
    save(checkpoints, 1)

    def deepen(fields):
        fields["arrays"]["x"]["shape"] = fields["arrays"]["x"]["pieces"][0]["shape"] = [1] * 900
        fields["arrays"]["x"]["pieces"][0]["start"] = [0] * 900

    forge(f"{checkpoints.folder}/step-00000001", deepen)
    with pytest.raises(files.InvalidFile, match="has 900 axes, and at most 32 are allowed"):
        checkpoints.restore(tree(0), step=1)


def test_older_versions_of_the_manifest_are_read_and_newer_ones_refused(checkpoints, monkeypatch):
    save(checkpoints, 1)
    path = f"{checkpoints.folder}/step-00000001/manifest.json"
    monkeypatch.setattr(inspect.getmodule(encode_manifest), "VERSION", 7)
    assert read_manifest(path).step == 1
    assert_step(checkpoints, 1)
    save(checkpoints, 2)
    monkeypatch.setattr(inspect.getmodule(encode_manifest), "VERSION", 6)
    with pytest.raises(files.InvalidFile, match="its version is 7, but this mlax reads up to 6; upgrade mlax"):
        checkpoints.restore(tree(0), step=2)


# What is acknowledged can be read


def test_what_could_not_be_restored_is_not_acknowledged(tmp_path, monkeypatch):
    checkpoints = train.Checkpoints(tmp_path, file_bytes=40)
    values = {"n" * 1024: np.arange(20.0), "é" * 1000: np.arange(20.0)}  # whose blocks have labels too
    checkpoints.save(1, values)
    checkpoints.wait()
    assert not unequal_leaves(checkpoints.restore(values).tree, values)
    with pytest.raises(ValueError, match="takes 33 axes to store, and at most 32 are allowed"):
        checkpoints.save(2, {"a": np.zeros((1,) * 32, "complex128")})
    with pytest.raises(TypeError, match="nested more than 31 levels"):
        checkpoints.save(2, {}, notes={"a": json.loads("[" * 40 + "]" * 40)})
    with pytest.raises(TypeError, match="duplicate key"):
        checkpoints.save(2, {}, notes={"1": 1, 1: 2})
    monkeypatch.setattr(inspect.getmodule(encode_manifest), "MAX_MANIFEST_BYTES", 100)
    checkpoints.save(2, {"a": np.ones(3)})
    with pytest.raises(files.InvalidFile, match="larger than 100 bytes"):
        checkpoints.wait()
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-00000001"]


def test_more_arrays_than_a_header_may_list_are_spread_over_files(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect.getmodule(write_checkpoint), "MAX_HEADER_BYTES", 20_000)
    values = {str(number): np.int32(number) for number in range(100)}
    checkpoints = train.Checkpoints(tmp_path)
    checkpoints.save(1, values)
    checkpoints.wait()
    assert 3 <= len(os.listdir(tmp_path / "step-00000001")) - 1 <= 5
    assert not unequal_leaves(checkpoints.restore(values).tree, values)


# Who deletes what


def test_a_reader_deletes_nothing_and_the_next_save_deletes_leftovers(checkpoints):
    save(checkpoints, 1)
    for name in (*LEFTOVERS, "notes.txt", ".hidden"):
        os.mkdir(f"{checkpoints.folder}/{name}")
        Path(checkpoints.folder, name, "file").write_text("x")
    before = sorted(os.listdir(checkpoints.folder))
    reader = train.Checkpoints(checkpoints.folder)
    assert reader.steps() == (1,) and reader.latest() == 1
    assert_step(reader, 1)
    assert sorted(os.listdir(checkpoints.folder)) == before
    save(reader, 2)
    kept = [".hidden", ".lock", "notes.txt", "step-00000001", "step-00000002"]
    assert sorted(os.listdir(checkpoints.folder)) == kept


def test_a_save_in_progress_survives_other_readers_and_writers(checkpoints, monkeypatch):
    """Another writer waits for the lock, so it cannot take the unfinished save for a leftover."""
    save(checkpoints, 1)
    writing, go_on, real = threading.Event(), threading.Event(), os.fsync

    def slow_fsync(descriptor):
        if threading.current_thread() in checkpoints._writer._threads:
            writing.set()
            go_on.wait(30)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    checkpoints.save(2, tree(2))
    assert writing.wait(30)
    other = train.Checkpoints(checkpoints.folder, timeout=0.05)
    assert_step(other, 1)
    other.save(3, tree(3))
    with pytest.raises(TimeoutError, match=r"\.lock: another process that saves here did not release it"):
        other.wait()
    other.timeout = 30
    other.save(3, tree(3))
    go_on.set()
    checkpoints.wait()
    other.wait()
    assert other.steps() == (1, 2, 3)
    assert_step(checkpoints, 3)


def test_where_there_are_no_locks_steps_are_saved_and_nothing_is_taken_for_a_leftover(checkpoints, monkeypatch):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    os.makedirs(f"{checkpoints.folder}/{LEFTOVERS[0]}")
    save(checkpoints, 1, 2)
    assert checkpoints.steps() == (1, 2) and os.path.isdir(f"{checkpoints.folder}/{LEFTOVERS[0]}")


def test_a_process_that_was_forked_while_a_file_was_locked_does_not_keep_it_locked(tmp_path):
    path = str(tmp_path / "lock")
    descriptor = files.lock_file(path)
    copy = os.dup(descriptor)  # as a forked process has
    assert files.lock_file(path) is None
    files.unlock_file(descriptor)
    files.unlock_file(files.lock_file(path))
    os.close(copy)


def test_a_lock_that_is_a_link_is_not_followed(checkpoints, tmp_path):
    os.mkdir(checkpoints.folder)
    (tmp_path / "precious").write_text("x")
    os.symlink(tmp_path / "precious", f"{checkpoints.folder}/.lock")
    checkpoints.save(1, tree(1))
    with pytest.raises(files.InvalidFile, match=r"\.lock: it is a symbolic link, not a regular file"):
        checkpoints.wait()
    assert (tmp_path / "precious").read_text() == "x"


def test_a_reader_whose_steps_are_deleted_meanwhile_finds_the_newer_ones(tmp_path, reports, monkeypatch):
    writer = train.Checkpoints(tmp_path, keep=1)
    save(writer, 1)
    reader, module = train.Checkpoints(tmp_path, report=reports.append), inspect.getmodule(train.Checkpoints)
    real, news = module.restore_step, iter((2, 3))

    def overtaken(folder, *arguments):
        if (step := next(news, None)) is not None:
            save(writer, step)
        return real(folder, *arguments)

    monkeypatch.setattr(module, "restore_step", overtaken)
    assert_step(reader, 3)
    assert reports == []


# What is not a step


@pytest.mark.parametrize("damage", ["no manifest", "link", "file", "manifest is a link"])
def test_steps_that_cannot_be_restored_are_refused_and_never_deleted(damage, checkpoints, tmp_path, reports):
    save(checkpoints, 1)
    step, away = Path(checkpoints.folder, "step-00000001"), tmp_path / "away"
    if damage == "no manifest":
        (step / "manifest.json").unlink()
    elif damage == "manifest is a link":
        (step / "manifest.json").rename(tmp_path / "manifest.json")
        (step / "manifest.json").symlink_to(tmp_path / "manifest.json")
    else:
        step.rename(away)
        step.symlink_to(away) if damage == "link" else step.write_text("x")
    again = train.Checkpoints(checkpoints.folder, keep=1, report=reports.append)
    assert again.steps() == ()
    with pytest.raises(
        files.InvalidFile, match=r"none of its steps can be restored.*move them elsewhere to start over"
    ):
        again.latest()
    with pytest.raises(files.InvalidFile, match="every step is damaged"):
        again.restore(tree(0))
    assert len(reports) == 1
    save(again, 1, 2, 3)
    assert again.steps() == (3,) and os.path.lexists(step) and (damage != "link" or away.is_dir())


def test_fit_refuses_a_folder_whose_steps_cannot_be_restored(tmp_path):
    from tests.train.tasks import OPTIMIZER, feed, init_state, objective

    step = train.step(objective, OPTIMIZER)
    train.fit(step, init_state(step), feed(), steps=2, run=tmp_path, show=False)
    (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(files.InvalidFile, match="none of its steps can be restored") as error:
        train.fit(step, init_state(step), feed(), steps=4, run=tmp_path, show=False)
    assert 'resume="restart" moves this run aside' in error.value.__notes__[0]
    assert (tmp_path / "checkpoints" / "step-00000002").is_dir()
    fitted = train.fit(step, init_state(step), feed(), steps=4, run=tmp_path, show=False, resume="restart")
    assert fitted.step == fitted.saved == 4


# Retention


def test_damaged_steps_do_not_count_as_kept(checkpoints):
    save(checkpoints, 10, 20, 30)
    for step in (20, 30):
        os.truncate(f"{checkpoints.folder}/step-{step:08d}/manifest.json", 5)
    again = train.Checkpoints(checkpoints.folder, keep=2, report=lambda _: None)
    assert again.restore(tree(0)).step == 10
    save(again, 11, 12)
    assert again.steps() == (11, 12, 20, 30)  # three good ones would be 10, 11 and 12
    save(again, 13, 30, 31)
    assert again.steps() == (30, 31)
    assert_step(again, 31)


def test_a_damaged_step_that_was_deleted_and_saved_anew_counts_as_kept(checkpoints):
    save(checkpoints, 1, 2)
    os.truncate(f"{checkpoints.folder}/step-00000002/manifest.json", 5)
    again = train.Checkpoints(checkpoints.folder, keep=1, report=lambda _: None)
    again.restore(tree(0))
    shutil.rmtree(f"{checkpoints.folder}/step-00000002")
    save(again, 2)
    assert again.steps() == (2,)


def test_a_save_keeps_the_older_steps_that_it_is_told_to(tmp_path):
    checkpoints = train.Checkpoints(tmp_path, keep=2, best=train.Maximize("accuracy"))
    for step in range(7):
        save(checkpoints, step, metrics={"accuracy": step == 2}, also_keep={1})
    assert checkpoints.steps() == (1, 2, 5, 6) and checkpoints.best() == 2
    checkpoints.save(7, tree(7))
    assert checkpoints.has(7) and not checkpoints.has(1) and checkpoints.steps() == (2, 6, 7)


def test_a_failure_to_delete_old_steps_says_that_the_new_one_is_saved(tmp_path, monkeypatch):
    checkpoints = train.Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    real = os.rename

    def failing(source, target):
        if os.path.basename(target).startswith(".removing"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), source)
        real(source, target)

    monkeypatch.setattr(os, "rename", failing)
    checkpoints.save(2, tree(2))
    with pytest.raises(OSError, match="step 2 is saved, but older ones could not be deleted: Input/output error"):
        checkpoints.wait()
    assert checkpoints.steps() == (1, 2)
    monkeypatch.undo()
    save(checkpoints, 3)
    assert checkpoints.steps() == (3,)


def test_a_best_step_whose_metrics_cannot_be_read_for_a_moment_is_not_deleted(tmp_path, monkeypatch):
    save(train.Checkpoints(tmp_path, keep=1, best=train.Minimize("loss")), 1, metrics={"loss": 0.1})
    checkpoints = train.Checkpoints(tmp_path, keep=1, best=train.Minimize("loss"))
    module = inspect.getmodule(train.Checkpoints)

    def unreadable(path):
        raise files.InvalidFile(f"{path}: it cannot be read (Input/output error).")

    with monkeypatch.context() as patch:
        patch.setattr(module, "read_manifest", unreadable)
        save(checkpoints, 2, metrics={"loss": 0.5})
    save(checkpoints, 3, metrics={"loss": 0.6})
    assert checkpoints.steps() == (1, 3) and checkpoints.best() == 1
