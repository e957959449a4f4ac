"""Diffusion in discrete time: adding noise, and removing it by DDPM's and DDIM's samplers."""

import functools
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax import ops
from mlax.core import Documented, Size, frozen

Predict = Callable[[Any, Any], Any]  # of noisy images and time steps (b,)
SMALLEST_VARIANCE = 1e-20


@frozen
class Diffusion(metaclass=Documented):
    """A diffusion process: how noise is added to images over `steps` time steps, and what a model predicts.

    In training, `noisy = process.add_noise(images, noise, time)`, and the model's output for `(noisy, time)` should be
    `process.target(images, noise, time)`. `zoo.ddpm` and `zoo.ddim` sample. https://arxiv.org/abs/2006.11239;
    cosine: https://arxiv.org/abs/2102.09672, equation 17; velocity: https://arxiv.org/abs/2202.00512, appendix D.

    >>> process = zoo.Diffusion(betas="cosine")
    >>> images = jnp.ones((2, 8, 8, 3))
    >>> process.add_noise(images, jnp.zeros_like(images), jnp.array([0, 999])).shape
    (2, 8, 8, 3)
    """

    _: KW_ONLY
    steps: Size = 1000  # from an image to noise
    betas: Literal["linear", "scaled_linear", "cosine"] = "linear"  # the variances of the noise added in each step
    first: float = 1e-4  # of the betas, unless they are cosine
    last: float = 0.02  # of the betas, unless they are cosine
    predicts: Literal["noise", "image", "velocity"] = "noise"  # what the model predicts
    variance: Literal["small", "large"] = "small"  # of DDPM's steps: that of the posterior, or beta
    clip: float | None = 1.0  # the largest magnitude of a predicted image; None: any

    def __post_init__(self):
        for name, choices in {
            "betas": ("linear", "scaled_linear", "cosine"),
            "predicts": ("noise", "image", "velocity"),
            "variance": ("small", "large"),
        }.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"Diffusion: {name} is {getattr(self, name)!r}, but must be {' or '.join(choices)}.")

    def add_noise(self, image: Any, noise: Any, time: Any) -> Any:
        """The noisy images at time steps (b,), integers from 0 to `steps - 1`; any other gives NaN."""
        signal, deviation = self._levels(image, time)
        return signal * image + deviation * noise

    def target(self, image: Any, noise: Any, time: Any) -> Any:
        """What the model should predict for the noisy images: the noise, the image, or the velocity."""
        signal, deviation = self._levels(image, time)
        wanted = {"noise": noise, "image": image, "velocity": signal * noise - deviation * image}[self.predicts]
        return jnp.where(jnp.isnan(signal), jnp.nan, wanted)

    def ddpm_step(self, x: Any, predicted: Any, time: Any, noise: Any) -> Any:
        """The images (b, ...) one time step earlier, by DDPM: equations 7 and 11; no noise is added in the last."""
        image, _ = self._image_and_noise(x, predicted, time)
        table = _tables(self)
        mean = _at(table.image_weight, time, x) * image + _at(table.x_weight, time, x) * x
        return mean + _at(table.deviation, time, x) * noise

    def ddim_step(self, x: Any, predicted: Any, time: Any, earlier: Any, noise: Any = None, eta: float = 0.0) -> Any:
        """The images (b, ...) at the time steps `earlier` (b,), -1 for the end, by DDIM: equations 12 and 16.

        `eta` is the fraction of DDPM's noise that is added: none for 0, and then `noise` may be None.
        """
        image, direction = self._image_and_noise(x, predicted, time)
        signal, deviation = self._levels(x, time)
        signal_before, deviation_before = self._levels(x, earlier, ends=True)
        if noise is None:
            return signal_before * image + deviation_before * direction
        ratio = signal / signal_before
        sigma = eta * deviation_before / deviation * jnp.sqrt(jnp.maximum(1 - ratio * ratio, 0))
        along = jnp.sqrt(jnp.maximum(deviation_before * deviation_before - sigma * sigma, 0))
        return signal_before * image + along * direction + sigma * noise

    def _levels(self, x: Any, time: Any, *, ends: bool = False) -> tuple[Any, Any]:
        """The factors of image and noise at each time step, broadcast to the images; if `ends`, 1 and 0 at -1."""
        table = _tables(self)
        return _at(table.signal, time, x, ends=ends), _at(table.noise, time, x, ends=ends)

    def _image_and_noise(self, x: Any, predicted: Any, time: Any) -> tuple[Any, Any]:
        """The image and the noise that a prediction stands for."""
        signal, deviation = self._levels(x, time)
        if self.predicts == "noise":
            image, noise = (x - deviation * predicted) / signal, predicted
        elif self.predicts == "image":
            image, noise = predicted, (x - signal * predicted) / deviation
        else:
            image, noise = signal * x - deviation * predicted, signal * predicted + deviation * x
        return image if self.clip is None else jnp.clip(image, -self.clip, self.clip), noise


DEFAULT = Diffusion()  # that of DDPM


def ddpm(predict: Predict, x: Any, rng: jax.Array, *, process: Diffusion = DEFAULT) -> Any:
    """Sample images by DDPM, one call of the model for each time step: noise x (b, ...) to images, algorithm 2.

        def predict(x, time):
            return model.fwd((x, time), trainables, inference_mode=True)[0]

        images = jax.jit(lambda rng: zoo.ddpm(predict, jax.random.normal(rng, (16, 32, 32, 3)), rng))(rng)

    https://arxiv.org/abs/2006.11239
    """
    _check_noise("ddpm", x)

    def step(x: Any, time: Any) -> tuple[Any, None]:
        noise = jax.random.normal(jax.random.fold_in(rng, time), x.shape, x.dtype)
        times = jnp.full(x.shape[0], time, np.int32)
        return process.ddpm_step(x, _predict("ddpm", predict, x, times), times, noise), None

    return lax.scan(step, x, jnp.arange(process.steps - 1, -1, -1, dtype=np.int32))[0]


def ddim(
    predict: Predict,
    x: Any,
    rng: jax.Array | None = None,
    *,
    process: Diffusion = DEFAULT,
    steps: int = 50,
    eta: float = 0.0,
) -> Any:
    """Sample images by DDIM in few steps: noise x (b, ...) to images, without further noise unless `eta` is above 0.

    `predict` is as in `zoo.ddpm`. With `eta=0`, the same noise gives the same image. https://arxiv.org/abs/2010.02502
    """
    _check_noise("ddim", x)
    if not 1 <= steps <= process.steps:
        raise ValueError(f"ddim: steps is {steps}, but must be from 1 to {process.steps}, the steps of the process.")
    if eta and rng is None:
        raise ValueError(f"ddim: eta is {eta}, which adds noise; pass a key, rng=.")
    stride = process.steps // steps

    def step(x: Any, time: Any) -> tuple[Any, None]:
        times = jnp.full(x.shape[0], time, np.int32)
        noise = None
        if eta and rng is not None:
            noise = jax.random.normal(jax.random.fold_in(rng, time), x.shape, x.dtype)
        earlier = jnp.maximum(times - stride, -1)
        return process.ddim_step(x, _predict("ddim", predict, x, times), times, earlier, noise, eta), None

    return lax.scan(step, x, jnp.asarray(np.arange(steps, dtype=np.int32)[::-1] * stride))[0]


def _check_noise(sampler: str, x: Any) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{sampler}: x is {x.dtype}{x.shape}, but must be noise: jax.random.normal(rng, {x.shape}).")


def _predict(sampler: str, predict: Predict, x: Any, times: Any) -> Any:
    """The model's prediction, which must look like x."""
    predicted = predict(x, times)
    if not hasattr(predicted, "shape"):
        raise TypeError(
            f"{sampler}: predict returned a {type(predicted).__name__}, but must return an array; of the pair that fwd "
            "returns, that is the first."
        )
    if predicted.shape != x.shape or predicted.dtype != x.dtype:
        raise ValueError(
            f"{sampler}: predict returned {predicted.dtype}{predicted.shape}, but must return the shape and dtype of "
            f"x, {x.dtype}{x.shape}."
        )
    return predicted


class _Tables(NamedTuple):
    """Coefficients by time step, in float64; the last entry is that of time step -1, an image without noise."""

    signal: np.ndarray  # of the image
    noise: np.ndarray
    image_weight: np.ndarray  # of the predicted image in the mean of DDPM's step
    x_weight: np.ndarray  # of the noisy image
    deviation: np.ndarray  # of the noise that DDPM's step adds


@functools.cache
def _tables(process: Diffusion) -> _Tables:
    betas = _betas(process)
    product = np.cumprod(1 - betas)
    before = np.concatenate([[1.0], product[:-1]])
    posterior = betas * (1 - before) / (1 - product)
    variance = np.maximum(posterior, SMALLEST_VARIANCE) if process.variance == "small" else betas
    tables = _Tables(
        np.sqrt(product),
        np.sqrt(1 - product),
        np.sqrt(before) * betas / (1 - product),
        np.sqrt(1 - betas) * (1 - before) / (1 - product),
        np.sqrt(variance) * (np.arange(process.steps) > 0),
    )
    ends = (1.0, 0.0, 1.0, 0.0, 0.0)
    return _Tables(*(np.append(table, end) for table, end in zip(tables, ends, strict=True)))


def _betas(process: Diffusion) -> np.ndarray:
    if process.betas == "linear":
        return np.linspace(process.first, process.last, process.steps)
    if process.betas == "scaled_linear":
        return np.linspace(process.first**0.5, process.last**0.5, process.steps) ** 2
    times = np.arange(process.steps + 1) / process.steps
    product = np.cos((times + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.minimum(1 - product[1:] / product[:-1], 0.999)


def _at(table: np.ndarray, time: Any, x: Any, *, ends: bool = False) -> Any:
    """The entries (b, 1, ...) of a table for time steps (b,), in the dtype of x: NaN for those that it does not have.

    The last entry is that of time step -1, which it has only if `ends`.
    """
    time, steps = jnp.asarray(time), len(table) - 1
    if time.shape not in ((), (x.shape[0],)):
        raise ValueError(
            f"Diffusion: time is {time.shape}, but must be {x.shape[:1]}: one for each image of {x.shape}."
        )
    row = jnp.where((time < 0) | (time >= steps), steps + 1, time)  # outside of the table
    row = jnp.where(time == -1, steps, row) if ends else row
    values = ops.embedding(row, jnp.asarray(table[:, None], x.dtype))  # (b, 1)
    return values.reshape(-1, *[1] * (x.ndim - 1))
