"""The ResNet on MNIST, smaller and for two epochs; in full with `--thorough`."""

import numpy as np
import pytest

from tests.examples.example_modules import compilations_after_the_first_step, load_example

mnist = load_example("mnist_resnet")


def test_two_epochs_of_half_the_images_reach_an_accuracy_of_0_65_and_compile_nothing_after_the_first_step(
    tmp_path, events, monkeypatch
):
    data, test = mnist.load()
    half = {name: array[::2] for name, array in data.items()}
    monkeypatch.setattr(mnist, "load", lambda: (half, test))
    config = mnist.Config(epochs=2, batch=40, widths=(8, 16), rate=1e-2, run=str(tmp_path / "mnist"))
    assert mnist.main(config)["accuracy"] > 0.65
    assert compilations_after_the_first_step(events) == 0


@pytest.mark.thorough
def test_the_accuracy_of_a_full_run_is_above_0_985(tmp_path):
    assert mnist.main(mnist.Config(run=str(tmp_path / "mnist")))["accuracy"] > 0.985


def test_the_test_set_has_100_images_of_each_digit_and_is_disjoint_from_the_training_set():
    data, test = mnist.load()
    assert np.bincount(data["digit"]).tolist() == [400] * 10
    assert np.bincount(test["digit"]).tolist() == [100] * 10
    seen = {image.tobytes() for image in data["image"]}
    assert not any(image.tobytes() in seen for image in test["image"])


def test_augmentation_by_zero_returns_the_image():
    import jax

    data, _ = mnist.load()
    images = data["image"][::500].astype(np.float32) / 255
    np.testing.assert_allclose(mnist.random_affine(images, jax.random.key(0), 0.0, 0.0), images, atol=1e-5)
    other = mnist.random_affine(images, jax.random.key(0), 0.2, 2.0)
    assert np.abs(other - images).mean() > 0.02
    np.testing.assert_allclose(other.mean(), images.mean(), rtol=0.2)
