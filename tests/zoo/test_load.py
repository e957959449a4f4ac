"""Folders and files of weights: what is loaded, where it is placed, what is written, and what is refused."""

import dataclasses
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mlax
from mlax import dtypes, files, nn, place, zoo
from tests.files.torch_archive import archive, state, strides_of, tensor, write_torch
from tests.processes import outputs_of, start_python

MODEL = zoo.GPT2(vocabulary=48, positions=16, width=16, depth=2, heads=2)


@pytest.fixture(scope="module")
def variables():
    shapes, _ = jax.eval_shape(MODEL.init, jax.random.key(0), MODEL.example_input())
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), shapes)


@pytest.fixture(scope="module")
def names(variables):
    return zoo.state_dict(MODEL, variables)


def assert_equal(ours, wanted):
    ours, wanted = (jax.tree.leaves_with_path(tree) for tree in (ours, wanted))
    assert [path for path, _ in ours] == [path for path, _ in wanted]
    for (path, one), (_, other) in zip(ours, wanted, strict=True):
        assert one.dtype == other.dtype, path
        np.testing.assert_array_equal(one, other, err_msg=str(path))


def test_one_file_shards_and_pytorch_files_load_the_same(tmp_path, variables, names):
    zoo.save(tmp_path / "one", MODEL, variables)
    zoo.save(tmp_path / "shards", MODEL, variables, max_shard_bytes=4096)
    files.make_folder(str(tmp_path / "torch"))
    (tmp_path / "torch" / "config.json").write_text(json.dumps(MODEL.config()))
    write_torch(tmp_path / "torch" / "pytorch_model.bin", names)
    files.make_folder(str(tmp_path / "torches"))
    (tmp_path / "torches" / "config.json").write_text(json.dumps(MODEL.config()))
    half = dict(list(names.items())[:9]), dict(list(names.items())[9:])
    weight_map = {}
    for at, part in enumerate(half):
        write_torch(tmp_path / "torches" / f"{at}.bin", part)
        weight_map |= dict.fromkeys(part, f"{at}.bin")
    (tmp_path / "torches" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 3
    for folder in ("one", "shards", "torch", "torches"):
        loaded = zoo.load(tmp_path / folder)
        assert loaded.model == MODEL and loaded.non_trainables is None
        assert_equal(loaded.trainables, variables)


def test_a_saved_folder_is_what_transformers_write(tmp_path, variables, names):
    zoo.save(tmp_path, MODEL, variables, max_shard_bytes=4096)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = {name: array for name, array in names.items() if name != "lm_head.weight"}
    assert index["weight_map"].keys() == names.keys()
    assert index["metadata"] == {"total_size": sum(array.nbytes for array in names.values())}
    for file in set(index["weight_map"].values()):
        assert files.metadata(tmp_path / file) == {"format": "pt"}
        assert (tmp_path / file).stat().st_size < 4096 + 1024 or len(files.load(tmp_path / file)) == 1
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gpt2"
    zoo.save(tmp_path, MODEL, variables)  # one file takes the place of the shards
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_a_model_saved_like_its_folder_keeps_the_stop_token_and_the_tokenizer(tmp_path, variables):
    zoo.save(tmp_path / "original", MODEL, variables)
    entries = {"eos_token_id": 47, "architectures": ["GPT2Model"], "dtype": "bfloat16", "n_layer": 9, "note": 1}
    entries |= {"task_specific_params": {"text-generation": {"do_sample": True}}, "scale_attn_weights": False}
    (tmp_path / "original" / "config.json").write_text(json.dumps({**MODEL.config(), **entries}))
    texts = {"generation_config.json": '{"eos_token_id": 47}', "tokenizer.json": "{}", "vocab.json": "{}"}
    for name, text in {**texts, "training_args.bin": "x"}.items():
        (tmp_path / "original" / name).write_text(text)
    zoo.save(tmp_path / "tuned", MODEL, variables, like=tmp_path / "original")
    kept = {name: entries[name] for name in ("eos_token_id", "task_specific_params", "note")}
    assert json.loads((tmp_path / "tuned" / "config.json").read_text()) == {**MODEL.config(), **kept}
    assert sorted(os.listdir(tmp_path / "tuned")) == sorted([*texts, "config.json", "model.safetensors"])
    assert all((tmp_path / "tuned" / name).read_text() == text for name, text in texts.items())
    assert zoo.load(tmp_path / "tuned").model == MODEL


def test_what_is_not_the_folder_of_the_model_cannot_be_saved_like(tmp_path, variables):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match=r"has a model_type of 'bert', but the model is 'gpt2'; pass the folder that"):
        zoo.save(tmp_path / "new", MODEL, variables, like=tmp_path / "bert")
    with pytest.raises(FileNotFoundError, match=r"save: there is no folder"):
        zoo.save(tmp_path / "new", MODEL, variables, like=tmp_path / "missing")
    (tmp_path / "secret").write_text("secret")
    zoo.save(tmp_path / "original", MODEL, variables)
    (tmp_path / "original" / "vocab.json").symlink_to("../secret")
    with pytest.raises(files.InvalidFile, match="leads out of"):
        zoo.save(tmp_path / "new", MODEL, variables, like=tmp_path / "original")
    assert not (tmp_path / "new").exists()
    zoo.save(tmp_path / "new", MODEL, variables, like=tmp_path / "original", within=tmp_path)
    assert (tmp_path / "new" / "vocab.json").read_text() == "secret"


def test_an_interrupted_save_leaves_the_old_model(tmp_path, variables, monkeypatch):
    zoo.save(tmp_path, MODEL, variables)
    other = jax.tree.map(jnp.zeros_like, variables)
    monkeypatch.setattr(files, "write_synced", lambda *_: 1 / 0)  # of config.json, when the weights are complete
    with pytest.raises(ZeroDivisionError):
        zoo.save(tmp_path, MODEL, other)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    assert_equal(zoo.load(tmp_path).trainables, variables)


def test_each_array_is_placed_where_the_plan_says(tmp_path, variables):
    files.save(tmp_path / "model.safetensors", zoo.state_dict(MODEL, variables))
    plan = place.Plan(
        mesh={"d": 8}, variables=[("**/up/kernel", P(None, None, "d")), ("embed/table", P("d")), ("**", P())]
    )
    for path in (tmp_path / "model.safetensors", zoo.state_dict(MODEL, variables)):
        trainables, _ = zoo.load_weights(MODEL, path, plan=plan, dtype="bfloat16")
        shardings, _ = plan.variable_shardings(MODEL, MODEL.example_input())
        assert jax.tree.map(lambda leaf: leaf.sharding, trainables) == shardings
        assert trainables["blocks"]["stacked"]["up"]["kernel"].addressable_shards[3].data.shape == (2, 16, 8)
        assert_equal(trainables, dtypes.cast(variables, "bfloat16"))


def test_host_memory_is_a_place_too(variables):
    plan = place.Plan(mesh={"d": 8}, variables=[("embed/table", P("d")), ("**", place.host)])
    trainables, _ = zoo.load_weights(MODEL, zoo.state_dict(MODEL, variables), plan=plan)
    assert trainables["positions"]["table"].sharding.memory_kind == "pinned_host"
    assert_equal(jax.device_get(trainables), jax.device_get(variables))


def test_without_a_plan_arrays_are_free_to_move_to_another_device(names):
    trainables, _ = zoo.load_weights(MODEL, names)
    assert not any(leaf.committed for leaf in jax.tree.leaves(trainables))


def test_weights_are_loaded_through_wrappers_that_keep_paths(variables, names):
    for wrapped in (dtypes.mixed_bfloat16(MODEL), mlax.Remat(MODEL)):
        assert_equal(zoo.load_weights(wrapped, names)[0], variables)
        assert zoo.state_dict(wrapped, variables).keys() == names.keys()


def test_nothing_is_cast_unless_a_dtype_is_given(names):
    narrow = {name: array.astype("bfloat16") for name, array in names.items()}
    assert {leaf.dtype for leaf in jax.tree.leaves(zoo.load_weights(MODEL, narrow))} == {jnp.dtype("bfloat16")}
    mixed = {**names, "transformer.h.1.ln_1.weight": narrow["transformer.h.1.ln_1.weight"]}
    with pytest.raises(
        ValueError, match=r"several dtypes \(pass dtype=\): transformer.h.0.ln_1.weight and others.*bfloat16, float32"
    ):
        zoo.load_weights(MODEL, mixed)
    assert {leaf.dtype for leaf in jax.tree.leaves(zoo.load_weights(MODEL, mixed, dtype="float16"))} == {
        jnp.dtype("float16")
    }
    with pytest.raises(ValueError, match=r"transformer.ln_f.weight int32, not like float32"):
        zoo.load_weights(MODEL, {**names, "transformer.ln_f.weight": np.ones(16, np.int32)})
    wide = {**names} | {f"transformer.ln_f.{name}": np.ones(16, np.float64) for name in ("weight", "bias")}
    with pytest.raises(
        ValueError, match=r"JAX disables \(pass dtype='float32', or .*: .*weight float64, .*bias float64$"
    ):
        zoo.load_weights(MODEL, wide)
    zoo.load_weights(MODEL, wide, dtype="float32")
    for disabled in ("float64", np.float64, float):
        with pytest.raises(ValueError, match=r"dtype is float64, which JAX disables; pass dtype='float32', or enable"):
            zoo.load_weights(MODEL, names, dtype=disabled)
    with pytest.raises(TypeError, match="dtype is int8, but must be a floating dtype"):
        zoo.load_weights(MODEL, names, dtype="int8")
    with pytest.raises(TypeError, match=r"dtype is 'torch.float16', but must be 'float32', 'bfloat16', 'float16' or"):
        zoo.load_weights(MODEL, names, dtype="torch.float16")


def test_statistics_of_a_mixed_model_with_bfloat16_weights_are_float32(names):
    trainables, _ = zoo.load_weights(MODEL, names, dtype="bfloat16")
    tokens = jnp.zeros((1, 5), "int32")
    for model, wanted in {MODEL: "bf16", dtypes.mixed_bfloat16(MODEL): "f32"}.items():
        program = str(jax.make_jaxpr(model.fwd)(tokens, trainables))
        assert set(re.findall(r":(\w+)\[[^]]*\] = (rsqrt|exp)\b", program)) == {(wanted, "rsqrt"), (wanted, "exp")}


def test_a_wrong_model_is_told_apart_before_anything_is_placed(names):
    deep = dataclasses.replace(MODEL, depth=100_000)
    with pytest.raises(ValueError, match="weights, but there are"):
        zoo.load_weights(deep, names)
    wide = dataclasses.replace(MODEL, width=1 << 20, heads=1)
    with pytest.raises(ValueError, match=r"misshapen: transformer.wte.weight \(48, 16\), not \(48, 1048576\)"):
        zoo.load_weights(wide, names)


def test_a_pytorch_file_that_would_grow_in_memory_is_refused(tmp_path, names, monkeypatch):
    monkeypatch.setitem(zoo.load_weights.__globals__, "_SHARED_BYTES", 0)
    records = {"m/data/0": np.zeros(16 * 64, np.float32).tobytes()}
    shared = {
        name: tensor(count=16 * 64, shape=array.shape, strides=strides_of(array)) for name, array in names.items()
    }
    path = tmp_path / "x.bin"
    path.write_bytes(archive(state(**shared), records))
    with pytest.raises(files.InvalidFile, match="but share 4,096"):
        zoo.load_weights(MODEL, path)
    zoo.load_weights(MODEL, files.load_torch(path))


def test_a_folder_without_a_configuration_or_weights_says_what_to_do(tmp_path, variables):
    with pytest.raises(FileNotFoundError, match=r"has no config.json; .*describe the model yourself"):
        zoo.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt9"}))
    with pytest.raises(ValueError, match="model_type is 'gpt9', but must be one of"):
        zoo.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MODEL.config()))
    with pytest.raises(FileNotFoundError, match=r"has none of model.safetensors"):
        zoo.load(tmp_path)
    with pytest.raises(TypeError, match="has no weight map"):
        zoo.save(tmp_path, nn.Linear(3), {})
    with pytest.raises(ValueError, match=r"differ in norm/scale; pass those"):
        zoo.save(tmp_path, MODEL, {**variables, "norm": {"shift": variables["norm"]["shift"]}})


def test_what_is_not_a_folder_is_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"load: there is no folder gpt2\.$"):
        zoo.load("gpt2")
    with pytest.raises(FileNotFoundError, match=r"no folder org/gpt-2.0; .*: hf download org/gpt-2.0 --local-dir gpt-"):
        zoo.load("org/gpt-2.0")
    with pytest.raises(FileNotFoundError, match=r"load_tokenizer: there is no folder org/gpt-2.0; .*: hf download"):
        zoo.load_tokenizer("org/gpt-2.0")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match=r"is not a folder; pass the one that has config.json"):
        zoo.load("model.safetensors")


def test_links_into_a_cache_are_followed_only_within_it(tmp_path, variables):
    zoo.save(tmp_path / "blobs", MODEL, variables)
    (tmp_path / "snapshot").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{name}")
    with pytest.raises(files.InvalidFile, match="leads out of"):
        zoo.load(tmp_path / "snapshot")
    assert_equal(zoo.load(tmp_path / "snapshot", within=tmp_path).trainables, variables)
    (tmp_path / "snapshot" / "config.json").unlink()
    (tmp_path / "snapshot" / "config.json").write_text(json.dumps(MODEL.config()))
    assert_equal(zoo.load(tmp_path / "snapshot", within=tmp_path / "blobs").trainables, variables)


def test_a_model_is_never_in_memory_twice_while_it_is_loaded(tmp_path, thorough):
    child = start_python("-m", "tests.zoo.peak", tmp_path, 13 if thorough else 4)
    (output,) = outputs_of(child)
    peak = json.loads(output)
    assert peak["model"] > (350e6 if thorough else 100e6)
    for how in ("plan", "none"):
        assert 0.9 * peak["model"] < peak[how] < 1.2 * peak["model"] + peak["leaf"]
