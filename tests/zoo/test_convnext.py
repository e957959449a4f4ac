import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import nn, zoo
from tests.asserts import assert_close_to_scale
from tests.references.zoo_weights import draw
from tests.zoo.reference import Reference


@functools.partial(jax.jit, static_argnums=0)  # the same model twice, with different names
def differentiate(model, trainables, images, weights):
    def loss(trainables):
        logits, _ = model.fwd(images, trainables)
        return (logits * weights).sum(), logits

    return jax.grad(loss, has_aux=True)(trainables)


@pytest.mark.parametrize("library", ["transformers", "torchvision"])
def test_logits_and_gradients_equal_those_of_transformers_and_torchvision(library):
    reference, names = Reference(f"convnext_{library}"), None if library == "transformers" else library
    model = zoo.convnext_from_config(reference.config)
    trainables, _ = reference.check_round_trip(model, reference.state(), names)
    gradient, logits = differentiate(model, trainables, draw(0, (3, 21, 35, 3)), draw(1, (3, 7)))
    assert_close_to_scale(logits, reference["logits"], 2e-5)
    reference.check_gradients(model, gradient, names=names)


@pytest.mark.parametrize(
    "size", ["tiny", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("small", "base", "large"))]
)
def test_the_published_sizes_have_their_numbers_of_parameters(size):
    numbers = {"tiny": 28_589_128, "small": 50_223_688, "base": 88_591_464, "large": 197_767_336}
    model = mlax.override(zoo.convnext(size), mlax.Repeat, mode="scan")  # it is traced faster
    trainables, _ = jax.eval_shape(model.init, jax.random.key(0), model.example_input())
    assert sum(leaf.size for leaf in jax.tree.leaves(trainables)) == numbers[size]


def test_the_rates_of_stochastic_depth_grow_linearly_over_the_blocks_of_all_stages():
    model = zoo.ConvNeXt(depths=(2, 1, 3), widths=(8, 8, 8), drop_path=0.5)
    rates = [layer.rate for layer in mlax.all_layers(model) if isinstance(layer, nn.PathDropout)]
    np.testing.assert_allclose(np.concatenate(rates), np.linspace(0, 0.5, 6))


def test_each_block_is_dropped_at_its_rate():
    model = zoo.ConvNeXt(depths=(3,), widths=(4,), classes=None, drop_path=0.8, layer_scale=1.0)
    images = jnp.asarray(draw(0, (500, 4, 4, 3)))
    trainables, _ = model.init(jax.random.key(0), images)
    captured = jax.jit(mlax.capture(model, "**/drop"))(images, trainables, rng=jax.random.key(1))
    (branches,) = jax.tree.leaves(captured[-1])
    dropped = jnp.all(branches == 0, axis=(2, 3, 4)).mean(axis=1, dtype="float32")  # (3, b, h, w, c) to (3,)
    np.testing.assert_allclose(dropped, [0.0, 0.4, 0.8], atol=0.07)


def test_a_saved_folder_loads_again(tmp_path):
    reference = Reference("convnext_transformers")
    model = dataclasses.replace(zoo.convnext_from_config(reference.config), classes=None)
    trainables, _ = zoo.load_weights(model, reference.state())
    zoo.save(tmp_path / "convnext", model, trainables)
    loaded = zoo.load(tmp_path / "convnext")
    assert loaded.model == model
    jax.tree.map(np.testing.assert_array_equal, loaded.trainables, trainables)
    with pytest.raises(ValueError, match="layer_scale_init_value is 0"):
        zoo.convnext_from_config({"layer_scale_init_value": 0})
