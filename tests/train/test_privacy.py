"""Differential privacy: the gradient of each example is clipped, and noise of the stated deviation is added."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mlax import nn, optim, train
from tests.asserts import assert_close

MODEL = nn.MLP((8, 3))
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.fold_in(KEY, 1), (12, 5)) * jnp.arange(1.0, 13.0)[:, None]
Y = jnp.arange(12) % 3


def objective(batch, trainables, non_trainables, *, rng=None, inference_mode=False):
    logits, new = MODEL.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
    return {"loss": optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])}, new


def one_step(privacy, batch=None):
    step = train.step(objective, optim.SGD(1.0), privacy=privacy)
    variables = MODEL.init(KEY, X)
    before = jax.tree.map(jnp.copy, variables[0])
    state, metrics = step(step.init(KEY, *variables), batch or {"x": X, "y": Y})
    return jax.tree.map(lambda a, b: a - b, before, state.trainables), metrics


@functools.cache
def reference(clip):
    """The clipped mean gradient, by Optax."""
    trainables, state = MODEL.init(KEY, X)

    def loss(trainables, x, y):
        return objective({"x": x[None], "y": y[None]}, trainables, state)[0]["loss"][0]

    grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))(trainables, X, Y)
    aggregate = optax.contrib.differentially_private_aggregate(clip, 0.0, KEY)
    with jax.numpy_dtype_promotion("standard"):
        return aggregate.update(grads, aggregate.init(trainables))[0]


@pytest.mark.parametrize("chunk", [None, 4])
def test_without_noise_the_gradient_is_the_mean_of_clipped_gradients(chunk):
    found, metrics = one_step(train.DifferentialPrivacy(0.5, 0.0, chunk=chunk))
    assert_close(found, reference(0.5), 1e-5, 1e-6)
    assert metrics["gradient_norm"] <= 0.5
    values, _ = objective({"x": X, "y": Y}, *MODEL.init(KEY, X))
    assert_close(metrics["loss"], values["loss"].mean(), 1e-5, 1e-6)


def test_the_noise_has_the_stated_deviation_and_differs_between_leaves():
    found, _ = one_step(train.DifferentialPrivacy(0.5, 3.0))
    plain = reference(0.5)
    noise = jax.tree.map(lambda a, b: np.ravel(a - b) * 12 / 1.5, found, plain)
    together = np.concatenate(jax.tree.leaves(noise))  # 75 samples
    assert 0.75 < together.std() < 1.25 and abs(together.mean()) < 0.4
    assert len(np.unique(together)) == together.size


def test_a_padded_example_adds_nothing():
    mask = jnp.asarray([1.0] * 6 + [0.0] * 6)
    found, _ = one_step(train.DifferentialPrivacy(1e6, 0.0), {"x": X, "y": Y, "mask": mask})
    wanted, _ = one_step(None, {"x": X[:6], "y": Y[:6]})
    assert_close(found, jax.tree.map(lambda leaf: leaf / 2, wanted), 1e-4, 1e-5)  # twelve examples, not six


def test_a_model_whose_examples_see_each_other_is_refused():
    norm = nn.BatchNorm()

    def batch_loss(batch, trainables, non_trainables, *, rng=None, inference_mode=False):
        y, new = norm.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return {"loss": jnp.mean(y * y, -1)}, new

    step = train.step(batch_loss, optim.SGD(0.1), privacy=train.DifferentialPrivacy(1.0, 1.0))
    with pytest.raises(ValueError, match=r"the statistic 'mean', which all examples of a batch change"):
        step(step.init(KEY, *norm.init(KEY, X)), {"x": X})


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"scaling": train.DynamicLossScale()}])
def test_options_that_mix_examples_are_refused(options):
    with pytest.raises(ValueError, match="privacy clips the gradient of each example"):
        train.step(objective, optim.SGD(0.1), privacy=train.DifferentialPrivacy(1.0, 1.0), **options)


def test_wrong_settings_are_errors():
    for settings, words in (
        ({"clip": 0.0, "noise": 1.0}, "clip is 0.0"),
        ({"clip": 1.0, "noise": -1.0}, "noise is -1.0"),
        ({"clip": 1.0, "noise": 1.0, "chunk": 0}, "chunk is 0"),
    ):
        with pytest.raises(ValueError, match=words):
            train.DifferentialPrivacy(**settings)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="privacy is 3"):
        train.step(objective, optim.SGD(0.1), privacy=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="does not divide the batch of 12"):
        one_step(train.DifferentialPrivacy(1.0, 1.0, chunk=5))
