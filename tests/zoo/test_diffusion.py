import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import zoo
from tests.zoo.reference import Reference

KINDS = {"epsilon": "noise", "sample": "image", "v_prediction": "velocity"}
BETAS = {"linear": "linear", "squaredcos_cap_v2": "cosine"}


def channels_last(images):
    return jnp.asarray(np.moveaxis(images, 1, -1))


def random_images(*shape):
    return channels_last(np.float32(np.random.default_rng(0).standard_normal(shape)))


def output_and_gradient(model, trainables, x, reference, select=lambda y: y):
    """The output, channels first, and the gradient of its product with the reference's weights."""
    weights = np.float32(np.random.default_rng(1).standard_normal(reference["output"].shape))

    def loss(trainables):
        y, _ = model.fwd(x, trainables, inference_mode=True)
        return (select(y) * channels_last(weights)).sum(), y

    gradient, y = jax.jit(jax.grad(loss, has_aux=True))(trainables)
    return y, gradient


@pytest.mark.parametrize("name", ["unet", pytest.param("unet_ddpm", marks=pytest.mark.thorough)])
def test_a_unet_and_its_gradients_are_those_of_diffusers(name):
    reference = Reference(name)
    model = zoo.unet_from_config(reference.config)
    trainables, _ = reference.check_round_trip(model, reference.state())
    x, time = random_images(2, 3, 6, 8), jnp.array([3, 987])
    inputs = (x, time) if model.classes is None else (x, time, jnp.array([4, 0]))
    y, gradient = output_and_gradient(model, trainables, inputs, reference)
    np.testing.assert_allclose(np.moveaxis(y, -1, 1), reference["output"], atol=2e-5, rtol=1e-5)
    reference.check_gradients(model, gradient)
    assert zoo.unet_from_config(model.config()) == model


def test_a_unet_of_the_published_checkpoints_computes_what_that_of_diffusers_computes():
    reference = Reference("unet_ddpm")
    model = zoo.unet_from_config(reference.config)
    trainables, _ = zoo.load_weights(model, reference.state())
    inputs = (random_images(2, 3, 6, 8), jnp.array([3, 987]))
    y, _ = jax.jit(lambda trainables: model.fwd(inputs, trainables, inference_mode=True))(trainables)
    np.testing.assert_allclose(np.moveaxis(y, -1, 1), reference["output"], atol=2e-5, rtol=1e-5)


def test_a_vae_computes_what_that_of_diffusers_computes():
    reference = Reference("vae")
    model = zoo.vae_from_config(reference.config)
    trainables, _ = reference.check_round_trip(model, reference.state())
    x = random_images(2, 3, 6, 8)
    outputs, gradient = output_and_gradient(model, trainables, x, reference, lambda y: y["reconstruction"])
    for name in ("mean", "log_variance"):
        np.testing.assert_allclose(np.moveaxis(outputs[name], -1, 1), reference[name], atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(np.moveaxis(outputs["reconstruction"], -1, 1), reference["output"], atol=2e-5, rtol=1e-5)
    reference.check_gradients(model, gradient)
    assert zoo.vae_from_config(model.config()) == model


@pytest.mark.thorough
def test_the_published_unets_and_the_vae_have_their_numbers_of_parameters():
    published = {zoo.unet("cifar10"): 35_746_307, zoo.unet("celebahq"): 113_673_219, zoo.vae(): 83_653_863}
    for model, number in published.items():
        trainables, _ = jax.eval_shape(model.init, jax.random.key(0), model.example_input())
        assert sum(leaf.size for leaf in jax.tree.leaves(trainables)) == number


@pytest.fixture(scope="module")
def samplers():
    with np.load("tests/references/samplers.npz") as file:
        return {name: file[name] for name in file.files}


def test_the_steps_of_ddpm_and_ddim_are_those_of_diffusers(samplers):
    x, predicted, noise = (samplers[name] for name in ("x", "predicted", "noise"))
    for name, wanted in samplers.items():
        kind, *words = name.split()
        if kind == "ddpm":
            predicts, betas, variance, time = words
            process = zoo.Diffusion(
                predicts=KINDS[predicts], betas=BETAS[betas], variance=variance.removeprefix("fixed_")
            )
            found = process.ddpm_step(x, predicted, jnp.full(2, int(time)), noise)
        elif kind == "ddim":
            predicts, betas, eta, time = words
            process = zoo.Diffusion(predicts=KINDS[predicts], betas=BETAS[betas])
            earlier = jnp.full(2, max(int(time) - 50, -1))
            found = process.ddim_step(x, predicted, jnp.full(2, int(time)), earlier, noise, float(eta))
        elif kind == "noisy":
            found = zoo.Diffusion(betas=BETAS[words[0]]).add_noise(x, noise, jnp.array([7, 800]))
        elif kind == "velocity":
            process = zoo.Diffusion(betas=BETAS[words[0]], predicts="velocity")
            found = process.target(x, noise, jnp.array([7, 800]))
        else:
            continue
        np.testing.assert_allclose(found, wanted, atol=5e-4, err_msg=name)  # its tables are float32 throughout


def test_samplers_draw_from_the_distribution_that_an_exact_model_predicts():
    """The noise in data that are normal, with mean 0.3 and deviation 0.1, is known exactly."""

    def predict(x, time):
        product = jnp.asarray(np.cumprod(1 - np.linspace(1e-4, 0.02, 1000)), x.dtype)[time][:, None]
        variance = product * 0.1**2 + 1 - product
        return jnp.sqrt(1 - product) * (x - jnp.sqrt(product) * 0.3) / variance

    rng = jax.random.key(0)
    noise = jax.random.normal(rng, (4000, 1))
    images = {
        "ddpm": jax.jit(lambda x: zoo.ddpm(predict, x, rng))(noise),
        "ddim": jax.jit(lambda x: zoo.ddim(predict, x, steps=500))(noise),
        "ddim with noise": jax.jit(lambda x: zoo.ddim(predict, x, rng, steps=500, eta=1.0))(noise),
    }
    for name, each in images.items():
        assert abs(each.mean() - 0.3) < 0.01, name
        assert abs(each.std() - 0.1) < 0.01, name


def test_a_time_step_that_the_process_does_not_have_gives_nan():
    process, x = zoo.Diffusion(steps=10), jnp.ones((3, 2))
    time = jnp.array([9, 10, -1])
    found = {
        "add_noise": process.add_noise(x, x, time),
        "target": process.target(x, x, time),
        "ddpm_step": process.ddpm_step(x, x, time, x),
        "ddim_step": process.ddim_step(x, x, time, jnp.zeros(3, int)),
        "earlier": process.ddim_step(x, x, jnp.full(3, 9), jnp.array([-1, 10, -2])),  # -1 is the end
    }
    for name, each in found.items():
        np.testing.assert_array_equal(jnp.isnan(each).all(-1), [False, True, True], err_msg=name)
        assert not jnp.isnan(each[0]).any()
    with pytest.raises(ValueError, match=r"time is \(2,\), but must be \(3,\)"):
        process.add_noise(x, x, jnp.array([1, 2]))
    with pytest.raises(ValueError, match="steps is 11, but must be from 1 to 10"):
        zoo.ddim(lambda x, time: x, x, process=process, steps=11)
    with pytest.raises(ValueError, match="betas is 'quadratic', but must be linear or scaled_linear or cosine"):
        zoo.Diffusion(betas="quadratic")


def test_labels_are_required_where_the_unet_has_classes():
    x, time = jnp.ones((1, 2, 2, 3)), jnp.array([1])
    model = zoo.UNet(widths=(4, 4), attention=(False, False), groups=2, classes=3)
    with pytest.raises(ValueError, match="must have labels"):
        model.init(jax.random.key(0), (x, time))


@pytest.mark.parametrize(
    ("x", "time", "message"),
    [
        ((2, 8, 8, 3), (), r"time is \(\), but must be \(b,\), one for each image: \(2,\)"),
        ((2, 8, 8, 3), (3,), r"time is \(3,\), but must be \(b,\)"),
        (
            (2, 7, 8, 3),
            (2,),
            r"h and w are \(7, 8\), but must be divisible by 2 for each level but the last, here by 2",
        ),
        ((2, 3, 8, 8), (2,), r"channels come last: images.transpose\(0, 2, 3, 1\)"),
        ((8, 8, 3), (8,), r"add a batch axis: images\[None\]"),
        ((2, 8, 8, 4), (2,), r"must be \(b, h, w, 3\)\."),
    ],
)
def test_a_unet_names_the_input_that_does_not_fit(x, time, message):
    model = zoo.UNet(widths=(4, 4), attention=(False, False), groups=2)
    with pytest.raises(ValueError, match=message):
        model.init(jax.random.key(0), (jnp.ones(x), jnp.zeros(time, int)))


def test_a_vae_refuses_images_that_it_would_crop():
    with pytest.raises(ValueError, match=r"VAE: h and w are \(15, 15\), but must be divisible by 2"):
        zoo.VAE(widths=(4, 4), groups=2).init(jax.random.key(0), jnp.ones((1, 15, 15, 3)))


def test_samplers_refuse_noise_and_predictions_that_do_not_fit():
    x, rng = jnp.ones((2, 4)), jax.random.key(0)
    samplers = {
        "ddpm": lambda predict, x: zoo.ddpm(predict, x, rng),
        "ddim": lambda predict, x: zoo.ddim(predict, x),
    }
    for name, sample in samplers.items():
        with pytest.raises(TypeError, match=rf"{name}: x is uint8\(2, 4\), but must be noise: jax.random.normal"):
            sample(lambda x, time: x, x.astype("uint8"))
        with pytest.raises(ValueError, match=rf"{name}: predict returned float32\(2, 3\), but must return the shape"):
            sample(lambda x, time: x[:, :3], x)
        with pytest.raises(ValueError, match=rf"{name}: predict returned float32\(2, 4\).*bfloat16\(2, 4\)"):
            sample(lambda x, time: x.astype("float32"), x.astype("bfloat16"))
        with pytest.raises(TypeError, match="of the pair that fwd returns, that is the first"):
            sample(lambda x, time: (x, None), x)
