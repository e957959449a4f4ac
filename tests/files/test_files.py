"""files.save and files.load round-trip bitwise, also through the reference implementation."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import mlax
from mlax import files, train
from mlax.files import SAFETENSORS_DTYPES
from tests.asserts import unequal_leaves

SHAPES = [(), (0,), (3, 0, 2), (1,), (5,), (2, 3, 4)]


def random_array(dtype, shape, seed=0):
    """Random bits of a dtype; booleans are 0 or 1."""
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == np.bool_ else 256, (*shape, dtype.itemsize), np.uint8)
    return raw.reshape(-1).view(dtype).reshape(shape) if raw.size else np.empty(shape, dtype)


@pytest.mark.parametrize("name", SAFETENSORS_DTYPES)
def test_every_dtype_and_shape_round_trips_bitwise(name, tmp_path):
    tree = {str(shape): random_array(SAFETENSORS_DTYPES[name], shape) for shape in SHAPES}
    files.save(tmp_path / "x.safetensors", tree)
    loaded = files.load(tmp_path / "x.safetensors")
    assert loaded.keys() == tree.keys()
    assert all(not unequal_leaves(loaded[shape], array) for shape, array in tree.items())


def test_the_reference_implementation_reads_what_mlax_writes(tmp_path):
    tree = {
        name: {"a": random_array(dtype, (3, 2)), "b": random_array(dtype, ())}
        for name, dtype in SAFETENSORS_DTYPES.items()
    }
    files.save(tmp_path / "x.safetensors", tree, {"made": "hère"})
    loaded = dict(safetensors.deserialize((tmp_path / "x.safetensors").read_bytes()))
    assert {f"{name}/{leaf}" for name in tree for leaf in "ab"} == loaded.keys()
    for path, found in loaded.items():
        name, leaf = path.split("/")
        assert (found["dtype"], tuple(found["shape"])) == (name, tree[name][leaf].shape)
        assert bytes(found["data"]) == tree[name][leaf].tobytes()
    with safetensors.safe_open(tmp_path / "x.safetensors", "np") as file:
        assert file.metadata() == {"made": "hère"} == files.metadata(tmp_path / "x.safetensors")


def test_mlax_reads_what_the_reference_implementation_writes(tmp_path):
    flat = {
        f"{name}.{shape}": random_array(dtype, shape) for name, dtype in SAFETENSORS_DTYPES.items() for shape in SHAPES
    }
    safetensors.numpy.save_file(flat, tmp_path / "x.safetensors", {"format": "np"})
    loaded = files.load(tmp_path / "x.safetensors")
    assert loaded.keys() == flat.keys()
    assert all(not unequal_leaves(loaded[name], array) for name, array in flat.items())


def test_arrays_are_memory_mapped_and_read_only(tmp_path):
    files.save(tmp_path / "x.safetensors", {"a": jnp.arange(3), "b": {"c": jnp.ones((), jnp.bfloat16)}})
    loaded = files.load(tmp_path / "x.safetensors")
    assert not loaded["a"].flags.writeable and not loaded["a"].flags.owndata
    assert jnp.asarray(loaded["b"]["c"]).dtype == jnp.bfloat16


def test_non_contiguous_and_big_endian_arrays_are_saved_by_value(tmp_path):
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    files.save(tmp_path / "x.safetensors", {"t": a.T, "step": a[:, ::2], "big": a.astype(">f4")})
    loaded = files.load(tmp_path / "x.safetensors")
    assert (loaded["t"] == a.T).all() and (loaded["step"] == a[:, ::2]).all() and (loaded["big"] == a).all()


def test_an_empty_tree_loads_as_an_empty_dict(tmp_path):
    files.save(tmp_path / "x.safetensors", {"a": {}, "b": None})
    assert files.load(tmp_path / "x.safetensors") == {}


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    files.save(path, {"a": np.ones(3)})

    def full(*args):
        raise OSError(28, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(files.NotEnoughSpace, match=r"needs [\d,]+ bytes and [\d,]+ are free") as failure:
        files.save(path, {"a": np.zeros(3)})
    assert str(tmp_path) in str(failure.value.filename)
    assert os.listdir(tmp_path) == ["x.safetensors"]
    assert (files.load(path)["a"] == 1).all()


@pytest.mark.parametrize(
    "tree, words",
    [
        (np.ones(3), "nested dicts"),
        ({"a": [1, 2]}, "'a' is a list"),
        (mlax.F(np.tanh), "the tree is a F, .* a layer has no variables: save those that init returns"),
        (train.TrainState(*[None] * 8), "save state.trainables, or the whole state with train.Checkpoints"),
        ([np.ones(3)], "the tree is a list, but must be nested dicts of arrays; name it"),
        ({1: np.ones(3)}, "not a string"),
        ({"a": {"..": np.ones(3)}}, "not a plain path"),
        ({"a\0": np.ones(3)}, "control character"),
        ({"a/b": np.ones(3), "a": {"b": np.ones(3)}}, "two leaves"),
        ({"a": np.ones(3), "a/b": np.ones(3)}, "'a/b' is below 'a', which is already a leaf; rename"),
        ({"a/b": np.ones(3), "a": np.ones(3)}, "'a' occurs twice; rename"),
        ({"__metadata__": np.ones(3)}, "'__metadata__' is not a valid array name"),
        ({"a": np.ones(3, np.complex128)}, "complex128, which safetensors does not support"),
        ({"a": np.array(["x"])}, "safetensors does not support"),
        ({"a": jax.random.key(0)}, "key_data"),
    ],
)
def test_a_tree_that_a_file_cannot_store_is_an_error(tree, words, tmp_path):
    with pytest.raises((TypeError, ValueError), match=words):
        files.save(tmp_path / "x.safetensors", tree)
    assert not os.listdir(tmp_path)


def test_the_error_names_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder; create it first") as failure:
        files.save(tmp_path / "runs" / "x.safetensors", {"a": np.ones(3)})
    assert failure.value.filename == str(tmp_path / "runs")


def test_an_index_combines_the_arrays_of_several_files(tmp_path):
    files.save(tmp_path / "1.safetensors", {"a": np.ones(3), "spare": np.ones(1)})
    files.save(tmp_path / "2.safetensors", {"b": {"c": np.zeros(2)}})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {}, "weight_map": {"a": "1.safetensors", "b/c": "2.safetensors"}}')
    loaded = files.load(index)
    assert loaded["a"].shape == (3,) and loaded["b"]["c"].shape == (2,) and len(loaded) == 2


def test_links_may_lead_into_the_folder_that_the_caller_allows(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    files.save(tmp_path / "blobs" / "1", {"a": np.ones(3)})
    (tmp_path / "snapshot" / "x.safetensors").symlink_to("../blobs/1")
    with pytest.raises(files.InvalidFile, match=r"leads out of .*/snapshot, to .*, or within='.*/blobs'"):
        files.load(tmp_path / "snapshot" / "x.safetensors")
    assert files.load(tmp_path / "snapshot" / "x.safetensors", within=tmp_path)["a"].shape == (3,)


def test_within_adds_to_the_folder_of_the_file(tmp_path):
    for folder in ("blobs", "snapshot", "elsewhere"):
        (tmp_path / folder).mkdir()
        files.save(tmp_path / folder / "1.safetensors", {"a": np.ones(3)})
    (tmp_path / "snapshot" / "2.safetensors").symlink_to("../blobs/1.safetensors")
    (tmp_path / "snapshot" / "3.safetensors").symlink_to("../elsewhere/1.safetensors")
    for name in ("1.safetensors", "2.safetensors"):
        assert files.load(tmp_path / "snapshot" / name, within=tmp_path / "blobs")["a"].shape == (3,)
    with pytest.raises(files.InvalidFile, match=r"leads out of .*/snapshot and .*/blobs"):
        files.load(tmp_path / "snapshot" / "3.safetensors", within=tmp_path / "blobs")
    (tmp_path / "snapshot" / "part").symlink_to("../elsewhere")  # a folder that is a link does not allow itself
    with (
        pytest.raises(files.InvalidFile, match="leads out of"),
        files.safe_open(str(tmp_path / "snapshot/part/1.safetensors"), tmp_path / "blobs", tmp_path / "snapshot"),
    ):
        pass


def test_an_index_is_named_when_one_of_its_files_is_missing(tmp_path):
    for name, load in {"x.safetensors": files.load, "x.bin": files.load_torch}.items():
        index = tmp_path / f"{name}.index.json"
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(FileNotFoundError, match=rf"{name}.index.json: it lists {name}, which is not beside it"):
            load(index)


def test_what_load_would_refuse_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match=r"files\.save: .*it has 10,001 metadata, and at most 10,000 are allowed"):
        files.save(tmp_path / "x.safetensors", {"a": np.ones(3)}, {str(number): "" for number in range(10_001)})
    with pytest.raises(ValueError, match="it has 65 parts, and at most 64 are allowed"):
        files.save(tmp_path / "x.safetensors", {"/".join("a" * 65): np.ones(3)})
    assert os.listdir(tmp_path) == []
