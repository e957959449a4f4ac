"""The diffusion model of digits, small and trained for a few steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread
from numpy.testing import assert_allclose

from mlax import train
from tests.examples.example_modules import load_example

SMALL = {
    "steps": 250,
    "batch": 64,
    "width": 64,
    "depth": 1,
    "rate": 8e-3,
    "average": 0.98,
    "dropout": 0.0,
    "sampling_steps": 12,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a short run, its scores, and its step."""
    diffusion, folder, steps = load_example("diffusion"), tmp_path_factory.mktemp("runs") / "diffusion", []
    make = train.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "step", lambda *given: steps.append(make(*given)) or steps[-1])
        scores = diffusion.main(diffusion.Config(**SMALL, guidance=3.0, samples=200, run=str(folder)))
    (step,) = steps
    return folder, scores, step


def test_after_a_few_steps_many_samples_are_the_requested_digits(run):
    _, scores, _ = run
    assert scores["accuracy"] > 0.4
    assert scores["real_accuracy"] > 0.98


def test_the_image_shows_a_hundred_digits(run):
    folder, _, _ = run
    picture = imread(folder / "digits.png")
    assert picture.shape[:2] == (600, 600)
    assert np.std(picture[..., :3]) > 0.05


def test_the_step_and_the_evaluation_are_compiled_once_each(run):
    _, _, step = run
    assert len(step.aot.compiled) == 1
    assert len(step.evaluation.aot.compiled) == 1


def test_sampling_follows_the_flow_from_noise_to_the_image():
    """With a flow that points straight at an image, any number of steps arrives there."""
    diffusion = load_example("diffusion")
    model = diffusion.VelocityField(8, 1, 0.0)
    x = {"image": jnp.zeros((2, 8, 8)), "time": jnp.zeros(2), "digit": jnp.zeros(2, jnp.int32)}
    trainables, _ = model.init(jax.random.key(0), x)  # its last kernel is zero at first: the flow is its bias
    trainables["out"]["bias"] = jnp.full(64, 0.25)
    noise = jax.random.normal(jax.random.key(1), (3, 8, 8))
    for moves in (1, 5):
        drawn = diffusion.sample(model, trainables, jnp.arange(3), jax.random.key(1), 2.0, moves)
        assert_allclose(drawn, jnp.clip(noise + 0.25, -1, 1), rtol=1e-5, atol=1e-5)


def test_copies_of_the_training_images_score_no_novelty():
    diffusion = load_example("diffusion")
    data, test = diffusion.load()
    copies = diffusion.score_samples(data, data, test)
    assert copies["accuracy"] > 0.99 and copies["novelty"] < 1e-3 and copies["diversity"] == pytest.approx(1.0)
    first = [np.flatnonzero(data["digit"] == digit)[0] for digit in range(10)]
    one_each = {name: np.repeat(array[first], 40, axis=0) for name, array in data.items()}
    assert diffusion.score_samples(one_each, data, test)["diversity"] < 1e-3


@pytest.mark.thorough
def test_a_full_run_samples_the_requested_digits(tmp_path):
    diffusion = load_example("diffusion")
    scores = diffusion.main(diffusion.Config(run=str(tmp_path)))
    assert scores["accuracy"] > 0.99
    assert scores["novelty"] > 0.85
    assert scores["diversity"] > 0.78
