import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import _gpu, zoo
from tests.asserts import assert_close_to_scale
from tests.references.zoo_weights import draw
from tests.zoo.reference import Reference


@pytest.mark.parametrize("library", ["transformers", "torchvision"])
def test_logits_and_gradients_equal_those_of_transformers_and_torchvision(library):
    reference, names = Reference(f"vit_{library}"), None if library == "transformers" else library
    model = zoo.vit_from_config(reference.config)
    trainables, _ = reference.check_round_trip(model, reference.state(), names)
    images, weights = jnp.asarray(draw(0, (3, *model.image_size, 3))), draw(1, (3, 7))

    def loss(trainables):
        logits, _ = model.fwd(images, trainables)
        return (logits * weights).sum(), logits

    gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(trainables)
    assert_close_to_scale(logits, reference["logits"], 2e-5)
    reference.check_gradients(model, gradient, names=names)


def test_both_heads_of_deit_and_resized_positions_equal_those_of_transformers():
    reference = Reference("vit_deit")
    model = zoo.vit_from_config(reference.config)
    trainables, _ = reference.check_round_trip(model, reference.state())
    images, weights = jnp.asarray(draw(0, (3, 18, 18, 3))), (draw(1, (3, 7)), draw(2, (3, 7)))

    def loss(trainables):
        logits, _ = model.fwd(images, trainables)
        return sum((each * weight).sum() for each, weight in zip(logits, weights, strict=True)), logits

    gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(trainables)
    wanted = reference["logits"], reference["distillation_logits"]
    assert_close_to_scale(logits, wanted, 2e-5)
    reference.check_gradients(model, gradient)

    larger, resized = zoo.resize_positions(model, trainables, (25, 15))
    images = jnp.asarray(draw(0, (3, 25, 15, 3)))
    logits, _ = jax.jit(larger.fwd, static_argnames="inference_mode")(images, resized, inference_mode=True)
    assert_close_to_scale(logits, reference["larger"], 2e-5)  # the mean of both heads
    with pytest.raises(ValueError, match="resize the images, or the table of positions by"):
        model.fwd(images, trainables)


def test_files_of_torchvision_and_modules_of_transformers_load_by_their_names():
    for name, other in (("torchvision", "torchvision_files"), ("transformers", "transformers_modules")):
        reference = Reference(f"vit_{name}")
        model = zoo.vit_from_config(reference.config)
        trainables, _ = zoo.load_weights(model, reference.state())
        state = zoo.state_dict(model, trainables, names=other)
        assert state.keys() != reference.state().keys()
        jax.tree.map(np.testing.assert_array_equal, zoo.load_weights(model, state)[0], trainables)
    assert "vit.layers.1.attention.q_proj.weight" in state
    assert "encoder.layers.encoder_layer_1.mlp.linear_2.bias" in zoo.state_dict(
        model, trainables, names="torchvision_files"
    )


def test_the_published_sizes_have_their_numbers_of_parameters():
    models = {
        zoo.vit("tiny"): 5_717_416,
        zoo.vit("small"): 22_050_664,
        zoo.vit("base"): 86_567_656,
        zoo.vit("base", patch=32): 88_224_232,
        zoo.vit("large"): 304_326_632,
        zoo.deit("base"): 87_338_192,
    }
    for model, number in models.items():
        trainables, _ = jax.eval_shape(model.init, jax.random.key(0), model.example_input())
        assert sum(leaf.size for leaf in jax.tree.leaves(trainables)) == number


@pytest.mark.parametrize("name", ["transformers", "deit"])
def test_a_saved_folder_loads_again_with_and_without_a_head(tmp_path, name):
    reference = Reference(f"vit_{name}")
    for classes in (7, None):
        model = dataclasses.replace(zoo.vit_from_config(reference.config), classes=classes)
        trainables, _ = zoo.load_weights(model, reference.state())
        zoo.save(tmp_path / str(classes), model, trainables)
        loaded = zoo.load(tmp_path / str(classes))
        assert loaded.model == model
        jax.tree.map(np.testing.assert_array_equal, loaded.trainables, trainables)


def test_configurations_that_the_model_does_not_compute_are_refused():
    for field, value in {
        "qkv_bias": False,
        "hidden_act": "relu",
        "patch_size": [4, 5],
        "image_size": [3, 4, 5],
    }.items():
        with pytest.raises(ValueError, match=field):
            zoo.vit_from_config({field: value})
    with pytest.raises(ValueError, match="architectures"):
        zoo.vit_from_config({"model_type": "deit", "architectures": ["DeiTForImageClassification"]})
    with pytest.raises(ValueError, match="at least 16, the size of a patch"):
        zoo.vit_from_config({"image_size": 8})


def test_an_odd_number_of_tokens_is_padded_once_on_a_gpu(monkeypatch):
    model = zoo.ViT(image_size=(16, 16), patch=8, width=8, depth=2, heads=2, hidden=16, classes=10)
    images = jax.random.normal(jax.random.key(0), (3, 16, 16, 3))
    trainables, _ = model.init(jax.random.key(1), images)

    def loss(trainables):
        logits, _ = model.fwd(images, trainables)
        return jnp.sin(logits).sum(), logits

    plain = jax.grad(loss, has_aux=True)(trainables)
    monkeypatch.setattr(_gpu, "prefers_kernels", lambda x: True)
    image_shapes = jax.ShapeDtypeStruct((5, 16, 16, 3), np.float32)  # other ones, since shapes of variables are cached
    shapes = jax.eval_shape(model.init, jax.random.key(1), image_shapes)[0]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, trainables)
    jaxpr = str(jax.make_jaxpr(loss)(trainables))
    assert "f32[3,6,8]" in jaxpr and jaxpr.count("pad[") == 1
    padded = jax.grad(loss, has_aux=True)(trainables)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), padded, plain)
