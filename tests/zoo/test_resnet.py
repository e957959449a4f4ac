import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import zoo
from tests.asserts import assert_close_to_scale
from tests.catalogue import MODELS
from tests.references.zoo_weights import digest, draw
from tests.zoo.reference import Reference


def read(name):
    reference = Reference(f"resnet_{name}")
    if name == "transformers":
        return reference, zoo.resnet_from_config(reference.config), None
    fields = {key: tuple(each) if isinstance(each, list) else each for key, each in reference.config.items()}
    return reference, zoo.ResNet(**fields), "torchvision"


@pytest.mark.parametrize(("name", "mode"), [("basic", "train"), ("bottleneck", "eval"), ("transformers", "train")])
def test_logits_gradients_and_statistics_equal_those_of_torchvision_and_transformers(name, mode):
    reference, model, names = read(name)
    trainables, state = reference.check_round_trip(model, reference.state(), names)
    wanted = reference[f"{mode} logits"]
    images, weights = jnp.asarray(draw(0, (3, 33, 47, 3))), draw(1, wanted.shape)

    def loss(trainables):
        logits, new = model.fwd(images, trainables, state, inference_mode=mode == "eval")
        return (logits * weights).sum(), (logits, new)

    gradient, (logits, new) = jax.jit(jax.grad(loss, has_aux=True))(trainables)
    assert_close_to_scale(logits, wanted, 2e-5)
    reference.check_gradients(model, gradient, names=names, kind=f"{mode} grad ")
    if mode == "train":
        statistics = zoo.state_dict(model, trainables, new, names=names)
        for key in filter(lambda key: "running" in key, reference.shapes):
            ours = digest(key, statistics[key])
            np.testing.assert_allclose(ours, reference[f"statistics {key}"], rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.parametrize(
    "depth", [50, *(pytest.param(depth, marks=pytest.mark.thorough) for depth in (18, 34, 101, 152))]
)
def test_the_published_sizes_have_their_numbers_of_parameters(depth):
    numbers = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}
    model = mlax.override(zoo.resnet(depth), mlax.Repeat, mode="scan")  # it is traced faster
    trainables, _ = jax.eval_shape(model.init, jax.random.key(0), model.example_input())
    assert sum(leaf.size for leaf in jax.tree.leaves(trainables)) == numbers[depth]


@pytest.mark.parametrize("inference_mode", [False, True])
def test_no_image_is_transposed_between_layers(inference_mode):
    model, images, trainables, state = MODELS["ResNet"].init()
    fwd = jax.jit(model.fwd, static_argnames="inference_mode")
    text = fwd.lower(images, trainables, state, inference_mode=inference_mode).as_text()
    transposed = set(re.findall(r"stablehlo\.transpose .*\(tensor<([x0-9]*)xf32>\)", text))
    kernels = {"x".join(map(str, leaf.shape[-4:])) for leaf in jax.tree.leaves(trainables)}
    assert "stablehlo.convolution" in text and transposed <= kernels


def test_a_model_without_a_head_loads_the_backbone_of_a_file_with_one():
    reference, model, _ = read("basic")
    trainables, state = zoo.load_weights(model, reference.state())
    backbone, same = zoo.load_weights(dataclasses.replace(model, classes=None), reference.state())
    assert {*trainables} - {*backbone} == {"head"}
    images = jnp.asarray(draw(0, (1, 33, 47, 3)))

    @jax.jit
    def run(images):
        features, _ = dataclasses.replace(model, classes=None).fwd(images, backbone, same, inference_mode=True)
        logits, _ = model.fwd(images, trainables, state, inference_mode=True)
        return features @ trainables["head"]["kernel"] + trainables["head"]["bias"], logits

    np.testing.assert_allclose(*run(images), rtol=1e-5)


def test_a_saved_folder_loads_again_and_the_configuration_is_that_of_transformers(tmp_path):
    reference, model, _ = read("transformers")
    trainables, state = zoo.load_weights(model, reference.state())
    zoo.save(tmp_path / "resnet", model, trainables, state)
    loaded = zoo.load(tmp_path / "resnet")
    assert loaded.model == model
    jax.tree.map(np.testing.assert_array_equal, loaded[1:], (trainables, state))
    for field, value in {"downsample_in_bottleneck": True, "hidden_act": "gelu", "depths": [2, 0]}.items():
        with pytest.raises(ValueError, match=field):
            zoo.resnet_from_config({**reference.config, field: value})
    with pytest.raises(ValueError, match="transformers' has a reduction of 4"):
        read("bottleneck")[1].config()


def test_a_configuration_of_too_many_blocks_is_refused_and_many_blocks_are_traced_once():
    for depths in ([500, 501], [1] * 9):
        with pytest.raises(ValueError, match="but at most 8 with 1,000 are supported"):
            zoo.resnet_from_config({"depths": depths, "hidden_sizes": [8] * len(depths)})
    model = zoo.ResNet(depths=(900,), widths=(8,), stem=8, block="basic", classes=None)
    with pytest.raises(ValueError, match="it has 9,005 weights, but there are 1 arrays"):
        zoo.load_weights(model, {"resnet.weight": np.zeros(3)})


def test_names_of_a_library_that_the_map_does_not_have_are_refused():
    with pytest.raises(ValueError, match="names is 'flax', but the weight map has 'torchvision' besides None"):
        zoo.state_dict(zoo.resnet(18), {}, names="flax")


def test_bytes_are_normalized_as_torchvision_normalizes_them():
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    wanted = (pixels / 255 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    np.testing.assert_allclose(zoo.normalize_images(pixels), wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(zoo.normalize_images(np.float32(pixels) / 255), wanted, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="as many channels"):
        zoo.normalize_images(np.zeros((2, 3, 8, 8), np.uint8))


def test_pixels_of_an_unknown_range_are_refused():
    for dtype in ("uint16", "int8", "int32", "bool"):
        with pytest.raises(TypeError, match=f"the images are {dtype}, but must be uint8, from 0 to 255, or floating"):
            zoo.normalize_images(np.zeros((2, 3), dtype))
    with pytest.raises(ValueError, match="are float32 up to 255, but must be from 0 to 1; divide them by 255"):
        zoo.normalize_images(np.full((2, 3), 255, np.float32))


@pytest.mark.parametrize(
    "model",
    [
        zoo.ResNet(depths=(1,), widths=(8,), stem=8),
        zoo.ConvNeXt(depths=(1,), widths=(8,)),
        zoo.ViT(image_size=(32, 32), width=8, depth=1, heads=2, hidden=8),
    ],
    ids=lambda model: type(model).__name__,
)
def test_images_in_another_layout_are_refused_with_the_transposition(model):
    for shape, hint in {
        (2, 3, 32, 32): r"channels come last: images.transpose\(0, 2, 3, 1\)",
        (32, 32, 3): r"add a batch axis: images\[None\]",
        (3, 32, 32): r"images.transpose\(1, 2, 0\)\[None\]",
        (32, 32): r"\(32, 32\), but must be \(b, h, w, channels\)\.",
    }.items():
        with pytest.raises(ValueError, match=rf"{type(model).__name__}: the images are .*{hint}"):
            model.init(jax.random.key(0), jnp.ones(shape))
