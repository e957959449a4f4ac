"""The persistent compilation cache: where it is, what it leaves alone, and that nothing in it can stop a run."""

import os
import subprocess
import sys
import time
import warnings
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mlax import optim, train
from mlax._compilation_cache import compilation_cache_root, compilation_cache_size, delete_oldest
from mlax._compilation_cache import start_compilation_cache as start
from mlax.cli import main

NAMES = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """JAX as a user starts it, without a cache, and an empty folder for caches."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in zip(NAMES, (None, True, 1.0, 0), strict=True):
        jax.config.update(name, value)
    with warnings.catch_warnings():
        yield tmp_path / "mlax" / "compiled"
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_in_the_cache_folder_of_the_user(fresh):
    folder = train.enable_compilation_cache()
    assert Path(folder).parent == fresh == compilation_cache_root()
    assert folder == jax.config.jax_compilation_cache_dir
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    assert train.enable_compilation_cache() == folder
    assert Path(folder).stat().st_mode & 0o077 == 0  # whoever can write to it can run code


def test_a_cache_that_the_user_has_configured_stays_as_it_is(fresh, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    assert train.enable_compilation_cache() == str(tmp_path / "mine")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 1.0
    assert not fresh.exists()


def test_a_threshold_that_the_user_has_configured_stays_as_it_is(fresh):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 5.0)
    train.enable_compilation_cache()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 5.0


def test_without_a_compilation_cache_nothing_is_written(fresh):
    jax.config.update("jax_enable_compilation_cache", False)
    assert start() == (None, "")
    assert jax.config.jax_compilation_cache_dir is None
    assert not fresh.exists()


def test_a_folder_that_cannot_be_written_turns_the_cache_off(fresh, tmp_path):
    (tmp_path / "mlax").write_text("a file, where the folder should be")
    found = start()
    assert found.folder is None
    assert "Not a directory" in found.problem or "File exists" in found.problem
    assert jax.config.jax_compilation_cache_dir is None


def test_a_folder_that_others_can_write_is_not_used(fresh):
    folder = Path(train.enable_compilation_cache())
    jax.config.update("jax_compilation_cache_dir", None)
    folder.chmod(0o777)
    assert "others may write to it" in start().problem


def test_a_truncated_program_is_deleted_and_a_whole_one_is_kept(fresh):
    folder = Path(train.enable_compilation_cache())
    whole = zlib.compress(os.urandom(5000))
    for name, data in {"whole-cache": whole, "half-cache": whole[:2000], "empty-cache": b"", "checked": b""}.items():
        (folder / name).write_bytes(data)
    os.utime(folder / "checked", (0, 0))
    jax.config.update("jax_compilation_cache_dir", None)
    train.enable_compilation_cache()
    assert {file.name for file in folder.iterdir()} == {"whole-cache", "checked"}


def test_the_programs_used_longest_ago_are_deleted_first(tmp_path):
    now = time.time()
    for age, name in enumerate("abcdefgh"):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (now - 100 * age, now - 100 * age))
    delete_oldest(tmp_path, 1000)
    assert len(list(tmp_path.iterdir())) == 8
    delete_oldest(tmp_path, 600)  # to three quarters of it
    assert sorted(file.name for file in tmp_path.iterdir()) == list("abcd")


def test_mlax_cache_shows_and_clears_the_folder(fresh, capsys):
    folder = Path(train.enable_compilation_cache())
    (folder / "jit_step-1-cache").write_bytes(bytes(2**20))
    assert compilation_cache_size() == (1, 2**20)
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"{fresh}: 1 compiled program, 1.0 MiB; delete them by mlax cache --clear\n"
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out == f"deleted 1 compiled program, 1.0 MiB: {fresh}\n"
    assert not fresh.exists()
    assert main(["cache", "--clear"]) == 0


def test_mlax_train_enables_the_cache_for_all_of_the_script(fresh, tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("import jax; print(jax.config.jax_compilation_cache_dir)")
    main(["train", str(script)])
    assert Path(capsys.readouterr().out.strip()).parent == fresh


def test_before_jax_is_imported_the_cache_is_enabled_by_its_environment_variables(fresh, monkeypatch):
    monkeypatch.delitem(sys.modules, "jax")
    for name in NAMES:
        monkeypatch.setenv(name.upper(), "")  # so that it is put back afterwards
        monkeypatch.delenv(name.upper())
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "False")
    assert start() == (None, "")
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "True")
    folder = start().folder
    assert folder == os.environ["JAX_COMPILATION_CACHE_DIR"] == start().folder
    assert os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"


def fit(show=False):
    """A short training; returns the loss."""

    def objective(batch, trainables, non_trainables, *, rng=None, inference_mode=False):
        return ((batch["x"] * trainables["w"] - 1.0) ** 2).mean(axis=1), non_trainables

    step = train.step(objective, optim.SGD(0.1))
    feed = train.Feed({"x": jnp.ones((4, 3))}, 2, seed=0)
    state = step.init(jax.random.key(0), {"w": jnp.zeros(3)})
    return train.fit(step, state, feed, steps=2, show=show, evaluate=feed).scores["loss"]


def test_fit_enables_the_cache_and_says_where_it_is(fresh, capsys):
    fit(show=True)
    assert Path(jax.config.jax_compilation_cache_dir).parent == fresh
    assert f"{jax.config.jax_compilation_cache_dir} (compiled programs)" in capsys.readouterr().out


def test_fit_runs_where_nothing_can_be_cached_and_says_so(fresh, tmp_path, capsys):
    (tmp_path / "mlax").write_text("")
    fit(show=True)
    assert "compiled programs are not cached: " in capsys.readouterr().out


PROGRAM = """
import warnings
warnings.simplefilter("error")  # the strictest user
import jax
from mlax._compilation_cache import enable_compilation_cache
jax.jit(lambda x: x + 1.0)(0.5)  # before the cache is enabled, as model.init is before train.fit
enable_compilation_cache()
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
print(*(float(jax.jit(f)(0.5)) for f in (jax.numpy.sin, jax.numpy.cos, jax.numpy.tan)))
print(sum("cache_hits" in event for event in found), sum("cache_misses" in event for event in found))
"""


def run(folder):
    """Compile in a process of its own: its results, programs found in the cache, programs written, and warnings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(Path(__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results, counts = done.stdout.splitlines()
    return results, *map(int, counts.split()), done.stderr


def test_a_second_process_finds_what_the_first_compiled_and_garbage_stops_neither(tmp_path):
    results, hits, misses, _ = run(tmp_path)
    assert (hits, misses) == (0, 3)
    for name, data in {"sin": b"garbage", "cos": b""}.items():
        (entry,) = tmp_path.rglob(f"jit_{name}-*-cache")
        entry.write_bytes(data and zlib.compress(data))  # the first as whole as zlib can tell, the second truncated
    again, hits, misses, warned = run(tmp_path)
    assert again == results
    assert (hits, misses) == (1, 2)
    assert warned.count("Error reading persistent compilation cache") == 1  # the truncated one was deleted before
