"""The guarantees over every model of the catalogue."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import mlax
from mlax import dtypes, zoo
from mlax.core import find_layers
from tests.asserts import assert_close_to_scale, compilations
from tests.catalogue import MODELS
from tests.files.torch_archive import write_torch

SCANNED = [name for name, row in MODELS.items() if find_layers(row.model, mlax.Repeat)]
ALIKE = ("ViT distilled", "ResNet basic", "BERTClassifier of RoBERTa")  # whose layers other rows compile


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def row(request):
    return request.param


def loss(model):
    def scalar(trainables, state, x, rng):
        y, _ = model.fwd(x, trainables, state, rng=rng)
        return sum(jax.lax.reduce_sum(leaf, range(leaf.ndim)) for leaf in jax.tree.leaves(y))

    return scalar


def test_every_public_model_has_a_row():
    models = {
        name
        for name in zoo.__all__
        if inspect.isclass(value := getattr(zoo, name)) and issubclass(value, mlax.Composite)
    }
    assert models == {type(row.model).__name__ for row in MODELS.values()}
    assert models == {name.split()[0] for name in MODELS}


def test_equal_descriptions_are_equal_and_hash_equal(row):
    again = dataclasses.replace(row.model)
    assert again == row.model and hash(again) == hash(row.model) and eval(repr(row.model), _names()) == row.model


def _names():
    return {**vars(mlax.core), **vars(mlax.nn), **vars(zoo), "jax": jax, "nn": mlax.nn}


def test_every_operation_is_in_one_dtype_forward_and_backward(row):
    model, x, trainables, state = row.init("bfloat16")
    arguments = (trainables, state, x, jax.random.key(0))
    assert dtypes.audit(jax.value_and_grad(loss(model)), *arguments, dtype="bfloat16") == ()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "Llama" else pytest.mark.thorough) for name in SCANNED]
)
def test_the_scan_of_layers_of_a_gpu_has_the_gradients_of_a_scan(monkeypatch, name):
    model, x, trainables, state = MODELS[name].init("float32")
    model = mlax.override(model, mlax.Repeat, mode="scan")
    gradients = []
    for is_gpu in (False, True):
        monkeypatch.setitem(mlax.Repeat.apply_with_keys.__globals__, "prefers_layer_scan", lambda *trees: is_gpu)
        run = jax.jit(lambda *arguments: jax.grad(loss(model))(*arguments))
        gradients.append(run(trainables, state, x, jax.random.key(0)))
    assert_close_to_scale(gradients[1], gradients[0], 1e-4)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=name, marks=pytest.mark.thorough if name in ALIKE else ()) for name, row in MODELS.items()],
)
def test_the_compiled_model_computes_what_it_computes_on_each_example_alone(row):
    model, x, trainables, state = row.init("float32")
    fwd = jax.jit(model.fwd, static_argnames="inference_mode")
    y, _ = fwd(x, trainables, state, inference_mode=True)
    with compilations() as compiled:
        fwd(x, trainables, state, inference_mode=True)
    assert not compiled

    def one(x):
        single = jax.tree.map(lambda leaf: leaf[None], x)
        return jax.tree.map(lambda leaf: leaf[0], model.fwd(single, trainables, state, inference_mode=True)[0])

    assert_close_to_scale(jax.jit(jax.vmap(one))(x), y, 2e-5)


def test_shapes_of_variables_need_no_input_and_no_memory(row):
    model, _, trainables, state = row.init("float32")
    shapes = jax.eval_shape(model.init, jax.random.key(0), model.example_input())
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, (trainables, state))


def test_a_state_dict_and_back_is_bitwise_the_same(row):
    model, _, trainables, state = row.init("float32")
    names = zoo.state_dict(model, trainables, state)
    back = zoo.load_weights(model, names)
    for one, other in zip(jax.tree.leaves(back), jax.tree.leaves((trainables, state)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_a_pytorch_file_and_back_is_bitwise_the_same(row, tmp_path):
    model, _, trainables, state = row.init("float32")
    names = zoo.state_dict(model, trainables, state)
    write_torch(tmp_path / "x.bin", names)
    again = zoo.state_dict(model, *zoo.load_weights(model, tmp_path / "x.bin"))
    assert again.keys() == names.keys()
    for name, array in names.items():
        assert again[name].dtype == array.dtype and again[name].tobytes() == array.tobytes(), name


def test_a_saved_folder_loads_the_same_model(row, tmp_path):
    model, _, trainables, state = row.init("float32")
    if not hasattr(model, "config"):
        with pytest.raises(TypeError, match="has no config"):
            zoo.save(tmp_path, model, trainables, state)
        return
    zoo.save(tmp_path, model, trainables, state, max_shard_bytes=2000)
    loaded = zoo.load(tmp_path)
    assert type(loaded.model) is type(model) and loaded.model.config() == model.config()
    (index,) = tmp_path.glob("*.safetensors.index.json")
    back = zoo.load_weights(model, index)  # a configuration does not say whether a BERT has a pooler
    for one, other in zip(jax.tree.leaves(back), jax.tree.leaves((trainables, state)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_model_can_be_exported_with_a_symbolic_batch_size(row):
    model, x, trainables, state = row.init("float32")
    (b,) = export.symbolic_shape("b")
    x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((b, *leaf.shape[1:]), leaf.dtype), x)
    exported = export.export(jax.jit(lambda *a: model.fwd(*a, inference_mode=True)[0]))(x, trainables, state)
    assert {leaf.shape[0] for leaf in exported.out_avals} == {b}
