"""Checkpoints: states round-trip bitwise, retention keeps the right steps, and errors say what to do."""

import ast
import gc
import json
import os
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import files, optim, train
from mlax.train.checkpoints import CHECKPOINT_DTYPES
from tests.asserts import unequal_leaves


class State(NamedTuple):
    step: Any
    trainables: Any
    optimizer: Any
    rng: Any


def state(seed=0, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(seed), 3)
    trainables = {
        "up": {"kernel": jax.random.normal(keys[0], (5, 7), dtype), "bias": jnp.zeros((7,), dtype)},
        "table": jax.random.normal(keys[1], (3, 4), jnp.float32),
    }
    optimizer = optim.AdamW(1e-2)
    return State(jnp.int32(3), trainables, optimizer.init(trainables), keys[2])


def assert_restored(found, wanted):
    """The trees are bitwise equal, with the same types, weak types and commitment to devices."""
    assert not unequal_leaves(found, wanted)
    assert [_kind(leaf) for leaf in jax.tree.leaves(found)] == [_kind(leaf) for leaf in jax.tree.leaves(wanted)]


def _kind(leaf):
    return type(leaf), getattr(leaf, "weak_type", None), getattr(leaf, "committed", None)  # keys have no weak type


@pytest.fixture
def messages():
    return []


@pytest.fixture
def checkpoints(tmp_path, messages):
    return train.Checkpoints(tmp_path / "checkpoints", report=messages.append)


def saved(checkpoints, *steps, **more):
    for step in steps:
        checkpoints.save(step, state(step), **more)
        checkpoints.wait()


def test_a_state_round_trips_bitwise(checkpoints):
    checkpoints.save(840, state(1), metrics={"loss": 0.5, "odd": float("nan")}, notes={"feed": {"seed": [1, 2]}})
    checkpoints.wait()
    restored = checkpoints.restore(state(2))
    assert_restored(restored.tree, state(1))
    assert (restored.step, restored.notes, restored.skipped) == (840, {"feed": {"seed": [1, 2]}}, ())
    assert restored.metrics["loss"] == 0.5 and np.isnan(restored.metrics["odd"])


def test_an_abstract_state_is_a_target(checkpoints):
    saved(checkpoints, 5)
    assert_restored(checkpoints.restore(jax.eval_shape(state)).tree, state(5))


def test_every_dtype_round_trips_bitwise(checkpoints):
    draws = np.random.default_rng(0)
    tree = {}
    for name, dtype in CHECKPOINT_DTYPES.items():
        raw = draws.integers(0, 2 if dtype == np.bool_ else 256, (3, 2, dtype.itemsize), np.uint8)
        tree[name] = {"some": raw.reshape(-1).view(dtype).reshape(3, 2)}
        tree[name] |= {"scalar": tree[name]["some"][0, 0], "none": np.empty((2, 0, 1), dtype)}
    numbers = {"i": 3, "f": 2.5, "b": True, "c": 1 + 2j}
    checkpoints.save(1, {"arrays": tree, "numbers": numbers})
    restored = checkpoints.restore({"arrays": tree, "numbers": {"i": 0, "f": 0.0, "b": False, "c": 0j}}).tree
    assert_restored(restored["arrays"], tree)
    assert restored["numbers"] == numbers
    narrow = {name: jnp.arange(3).astype(name) for name in ("int4", "uint4", "float8_e4m3b11fnuz", "bool")}
    checkpoints.save(2, narrow)
    assert_restored(checkpoints.restore(narrow).tree, narrow)


def test_typed_keys_of_every_algorithm_round_trip(checkpoints):
    tree = {impl: jax.random.split(jax.random.key(7, impl=impl), 3) for impl in ("threefry2x32", "rbg", "unsafe_rbg")}
    tree["one"] = jax.random.key(8)
    checkpoints.save(1, tree)
    assert_restored(checkpoints.restore(tree).tree, tree)
    with pytest.raises(ValueError, match="'one' was saved as threefry2x32, but the target has rbg"):
        checkpoints.restore({**tree, "one": jax.random.key(0, impl="rbg")})
    with pytest.raises(ValueError, match="'one' was saved as threefry2x32, but the target has a plain array"):
        checkpoints.restore({**tree, "one": jnp.zeros(2, jnp.uint32)})


def test_weak_types_stay_weak(checkpoints):
    tree = {"weak": jnp.asarray(2.0), "strong": jnp.float32(2.0)}
    checkpoints.save(1, tree)
    assert_restored(checkpoints.restore(tree).tree, tree)


def test_donating_buffers_after_save_does_not_change_what_is_saved(tmp_path):
    optimizer = optim.AdamW(1e-1)

    @jax.jit
    def grads(trainables):
        return jax.grad(lambda w: sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(w)))(trainables)

    step = jax.jit(lambda w, s: optimizer.update(grads(w), s, w), donate_argnums=(0, 1))
    trainables = {"kernel": jax.random.normal(jax.random.key(0), (300, 300)), "bias": jnp.ones((300,))}
    slots, expected = optimizer.init(trainables), {}
    checkpoints = train.Checkpoints(tmp_path, keep=None)
    for number in range(8):
        expected[number] = jax.tree.map(np.array, (trainables, slots))
        checkpoints.save(number, (trainables, slots))
        trainables, slots = step(trainables, slots)  # overwrites the buffers while they are being saved
    checkpoints.wait()
    for number, values in expected.items():
        restored = checkpoints.restore((trainables, slots), step=number).tree
        assert jax.tree.all(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == y.tobytes(), restored, values))
    again = step(*restored)  # restored arrays can be donated
    assert again[0]["bias"].shape == (300,)


def test_retention_keeps_the_last_steps_and_the_one_just_saved(checkpoints):
    saved(checkpoints, 900, 1000, 20, 1100, 30)
    assert checkpoints.steps() == (30, 900, 1000, 1100)  # the step just saved is never deleted
    saved(checkpoints, 1200)
    assert checkpoints.steps() == (1000, 1100, 1200) and checkpoints.latest() == 1200


def test_the_best_step_is_kept(tmp_path):
    for by, metrics, best in (
        (train.Maximize("accuracy"), [0.1, 0.9, 0.9, float("nan"), 0.5, 0.3], 2),
        (train.Minimize("loss"), [1.0, 0.2, 0.3, float("nan"), 0.5, 0.3], 1),
    ):
        checkpoints = train.Checkpoints(tmp_path / by.metric, keep=1, best=by)
        assert checkpoints.best() is None
        for step, value in enumerate(metrics):
            checkpoints.save(step, {"x": np.full(3, step)}, metrics={by.metric: value})
        checkpoints.save(6, {"x": np.zeros(3)})
        checkpoints.wait()
        assert checkpoints.best() == best and checkpoints.steps() == (best, 6)
        assert train.Checkpoints(tmp_path / by.metric, best=by).best() == best
    with pytest.raises(ValueError, match="no metric"):
        train.Checkpoints(tmp_path).best()


def test_a_step_that_is_saved_again_is_replaced(checkpoints):
    saved(checkpoints, 1, 2)
    checkpoints.save(2, state(77))
    checkpoints.save(2, state(78))
    checkpoints.wait()
    assert checkpoints.steps() == (1, 2) and len(os.listdir(checkpoints.folder)) == 3  # with the lock
    assert_restored(checkpoints.restore(state()).tree, state(78))


def test_large_arrays_are_split_over_files_of_bounded_size(tmp_path):
    tree = {"a": np.arange(5000.0).reshape(50, 100), "b": np.arange(3), "c": np.arange(4000.0).reshape(1, 2, 2000)}
    checkpoints = train.Checkpoints(tmp_path, file_bytes=4000)
    checkpoints.save(1, tree)
    checkpoints.wait()
    found = [name for name in os.listdir(tmp_path / "step-00000001") if name != "manifest.json"]
    assert len(found) > 15 and all(os.path.getsize(tmp_path / "step-00000001" / name) < 5000 for name in found)
    assert_restored(checkpoints.restore(tree).tree, tree)


def test_the_files_are_plain_safetensors_with_the_leaf_names(checkpoints):
    saved(checkpoints, 4)
    folder = os.path.join(checkpoints.folder, "step-00000004")
    assert sorted(os.listdir(folder)) == ["arrays-00001-of-00001.safetensors", "manifest.json"]
    loaded = files.load(os.path.join(folder, "arrays-00001-of-00001.safetensors"))
    assert loaded["trainables"]["up"]["kernel"].shape == (5, 7)
    assert loaded["optimizer"]["mean"]["table"].shape == (3, 4)
    manifest = json.loads(pathlib.Path(folder, "manifest.json").read_text())
    assert manifest["arrays"]["rng"]["key"] == "threefry2x32"


def test_only_some_leaves_are_restored_and_the_rest_come_from_the_target(checkpoints):
    saved(checkpoints, 1)
    restored = checkpoints.restore(state(2), only=("trainables/**",)).tree
    assert_restored((restored.trainables, restored.rng), (state(1).trainables, state(2).rng))
    only_weights = {"trainables": state(2).trainables}
    assert_restored(checkpoints.restore(only_weights, only=("trainables/**",)).tree["trainables"], state(1).trainables)


def test_leaves_can_be_restored_to_the_host_without_touching_a_device(checkpoints, monkeypatch):
    saved(checkpoints, 1)

    def host(tree):
        return jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), tree)

    described = jax.eval_shape(state)
    slots = described.optimizer._replace(mean=host(described.optimizer.mean))
    target = described._replace(trainables=host(described.trainables), optimizer=slots)
    for name in ("device_put", "make_array_from_callback"):
        monkeypatch.setattr(jax, name, lambda *_: pytest.fail("something was put on a device"))
    restored = checkpoints.restore(target, only=("*trainables/**", "optimizer/mean/**")).tree
    assert_restored(restored.trainables, jax.tree.map(np.asarray, state(1).trainables))
    assert_restored(restored.optimizer.mean, jax.tree.map(np.asarray, state(1).optimizer.mean))
    assert restored.rng is described.rng and restored.step is described.step
    assert restored.optimizer.square == described.optimizer.square


def test_leaves_are_restored_under_other_names(checkpoints):
    saved(checkpoints, 1)
    target = {"weights": {"first": state(2).trainables["up"], "table": state(2).trainables["table"]}}
    names = {"trainables": "weights", "trainables/up": "weights/first"}
    restored = checkpoints.restore(target, only=("weights/**",), names=names).tree
    assert_restored(restored["weights"]["first"], state(1).trainables["up"])
    with pytest.raises(KeyError, match="'trainable' matches nothing"):
        checkpoints.restore(target, names={"trainable": "weights"})
    with pytest.raises(ValueError, match="would both be"):
        checkpoints.restore(target, names={"step": "rng"})


def test_the_error_for_stacks_saved_without_their_name_says_how_to_insert_it(tmp_path):
    saved = {"w": {"blocks": {"up": jnp.ones((3, 2)), "moe": {"experts": {"up": jnp.ones((3, 4, 2))}}}}}
    target = {
        "w": {
            "blocks": {
                "stacked": {"up": jnp.zeros((3, 2)), "moe": {"experts": {"stacked": {"up": jnp.zeros((3, 4, 2))}}}}
            }
        }
    }
    checkpoints = train.Checkpoints(tmp_path)
    checkpoints.save(0, saved)
    checkpoints.wait()
    with pytest.raises(ValueError, match=r"are not saved.*stacks of layers have a name now: pass names=") as caught:
        checkpoints.restore(target)
    names = ast.literal_eval(str(caught.value).partition("pass names=")[2].rstrip("."))
    assert all((leaf == 1).all() for leaf in jax.tree.leaves(checkpoints.restore(target, names=names).tree))


def test_the_error_of_a_target_that_does_not_match_says_what_to_do(checkpoints):
    tree = {"a": {"kernel": jnp.ones((2, 3))}, "b": jnp.ones(2)}
    checkpoints.save(1, tree)
    for target, words in (
        ({**tree, "a": {"kernel": jnp.ones((3, 2))}}, r"'a/kernel' was saved as float32\[2, 3\].*float32\[3, 2\]"),
        ({**tree, "b": jnp.ones(2, jnp.bfloat16)}, r"'b' was saved as float32\[2\].*bfloat16\[2\].*only="),
        ({**tree, "c": jnp.ones(2)}, "'c' is not saved.*only=.*names="),
        ({"a": tree["a"]}, "'b' is saved, but not in the target; pass only="),
        ({"a": tree["a"], "bias": tree["b"]}, r"'bias' is not saved \(saved, but not in the target: 'b'\)"),
        ({**tree, "b": "x"}, "the target has a str at 'b'"),
        ({**tree, "b": jax.random.key(0)}, "'b' was saved as a plain array, but the target has threefry2x32"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            checkpoints.restore(target)
    with pytest.raises(KeyError, match="'a/kernels' matches nothing; did you mean 'a/kernel'"):
        checkpoints.restore(tree, only=("a/kernels",))
    with pytest.raises(FileNotFoundError, match="no step 7"):
        checkpoints.restore(tree, step=7)


def test_an_empty_folder_has_no_steps(checkpoints):
    assert checkpoints.steps() == () and checkpoints.latest() is None and checkpoints.failure() is None
    with pytest.raises(FileNotFoundError, match="there is no step to restore"):
        checkpoints.restore(state())


def test_invalid_arguments_of_save_are_errors_at_once(checkpoints):
    deleted = jnp.ones(3)
    deleted.delete()
    for step, tree, words in (
        (-1, {}, "must be an integer"),
        (1.5, {}, "must be an integer"),
        (True, {}, "must be an integer"),
        (1, {"a": "x"}, "'a' is a str"),
        (1, {"a": np.array([object()])}, "dtype object"),
        (1, {"a": deleted}, "tree/a was donated"),
        (1, {"..": jnp.ones(3)}, "rename it"),
        (1, {"a/b": jnp.ones(3), "a": {"b": jnp.ones(3)}}, "Two leaves"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            checkpoints.save(step, tree)
    for step, said in ((state(), "a State"), (np.ones(3), "float64[3]"), ({"a": jnp.ones(2)}, "{a: float32[2]}")):
        words = re.escape(f"save: the step is {said}, but must be an integer; write save(int(state.step), state)")
        with pytest.raises(ValueError, match=words):
            checkpoints.save(step, 3)
    with pytest.raises(TypeError, match="must be JSON-serializable"):
        checkpoints.save(1, {}, notes={"x": jnp.ones(3)})
    with pytest.raises(TypeError, match="must be scalars by name"):
        checkpoints.save(1, {}, metrics={"x": jnp.ones(3)})
    with pytest.raises(ValueError, match="1 or more"):
        train.Checkpoints(checkpoints.folder, keep=0)
    with pytest.raises(TypeError, match=r"best is 'loss', .* pass best=train.Minimize\('loss'\) or best=train.Ma"):
        train.Checkpoints(checkpoints.folder, best="loss")
    with pytest.raises(TypeError, match=r"best is the class Minimize, .* pass best="):
        train.Checkpoints(checkpoints.folder, best=train.Minimize)
    assert checkpoints.steps() == ()


def test_a_damaged_step_is_reported_and_the_step_before_it_is_restored(checkpoints, messages):
    saved(checkpoints, 1, 2)
    path = os.path.join(checkpoints.folder, "step-00000002", "arrays-00001-of-00001.safetensors")
    os.truncate(path, os.path.getsize(path) - 1)
    restored = checkpoints.restore(state())
    assert_restored(restored.tree, state(1))
    assert restored.step == 1
    assert [step for step, _ in restored.skipped] == [2] and path in messages[0] and "step 2 is skipped" in messages[0]
    with pytest.raises(files.InvalidFile, match="bytes, not"):
        checkpoints.restore(state(), step=2)
    saved(checkpoints, 2)  # training reaches it again
    assert_restored(checkpoints.restore(state()).tree, state(2))


def test_restore_raises_if_every_step_is_damaged(checkpoints, messages):
    saved(checkpoints, 1)
    os.unlink(os.path.join(checkpoints.folder, "step-00000001", "manifest.json"))
    assert checkpoints.steps() == ()
    with pytest.raises(files.InvalidFile, match=r"every step is damaged.*manifest\.json"):
        checkpoints.restore(state())


def test_a_failed_save_is_reported_once_and_never_raised_by_the_next_save(checkpoints, messages, monkeypatch, capsys):
    saved(checkpoints, 1)
    real = os.fsync

    def full(*args):
        raise OSError(28, "full")

    monkeypatch.setattr(os, "fsync", full)
    checkpoints.save(2, state())
    with pytest.raises(files.NotEnoughSpace, match="bytes"):
        checkpoints.wait()
    checkpoints.wait()
    checkpoints.save(3, state())
    checkpoints.save(4, state())
    assert len(messages) == 1 and "the previous save failed with NotEnoughSpace" in messages[0]  # of step 3
    assert capsys.readouterr().err == ""
    checkpoints._join()
    assert isinstance(checkpoints.failure(), files.NotEnoughSpace) and checkpoints.failure() is None
    checkpoints.save(5, state())
    checkpoints._join()
    monkeypatch.setattr(os, "fsync", real)
    assert checkpoints.steps() == (1,) and sorted(os.listdir(checkpoints.folder)) == [".lock", "step-00000001"]
    saved(fresh := train.Checkpoints(checkpoints.folder), 6)
    assert fresh.latest() == 6


def test_an_unchecked_failure_is_reported_when_the_object_is_deleted(tmp_path, messages, monkeypatch):
    checkpoints = train.Checkpoints(tmp_path, report=messages.append)
    monkeypatch.setattr(os, "mkdir", lambda *_: (_ for _ in ()).throw(PermissionError(13, "no")))
    checkpoints.save(1, {"a": np.ones(3)})
    checkpoints._join()
    del checkpoints
    gc.collect()
    assert len(messages) == 1 and "nothing checked" in messages[0]


def test_links_and_folders_of_other_names_are_not_steps(tmp_path, checkpoints):
    saved(checkpoints, 1)
    os.symlink(os.path.join(checkpoints.folder, "step-00000001"), os.path.join(checkpoints.folder, "step-00000009"))
    for name in ("step-1", "step-00000008x", "step-00000007"):
        os.mkdir(os.path.join(checkpoints.folder, name))
    assert checkpoints.steps() == (1,)
