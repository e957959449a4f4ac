"""Train a network that generates handwritten digits from noise: class-conditional flow matching with guidance.

    python examples/diffusion.py [--steps 3000] [--run runs/diffusion]     # or: mlax train examples/diffusion.py

takes 75 seconds on two CPU cores. A support vector machine that classifies 99.1% of real digits correctly then
classifies 99.9 to 100% of 1,000 samples as the requested digit, over three seeds. The distance of a sample to the
nearest training image is 0.89 times that of a held-out digit (for copies it would be 0), and the distance between
samples is 0.82 times that between real digits. A hundred samples are in `runs/diffusion/digits.png`. The images come
with scikit-learn: nothing is downloaded.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.metrics import pairwise_distances
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

import mlax
from mlax import nn, ops, optim, train

UNCONDITIONAL = 10  # the label of images without a digit


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings; each field is a command-line option."""

    steps: int = 3000  # training steps in all, including those of a run that is resumed
    batch: int = 256  # images per step
    width: int = 192  # features of the hidden layers
    depth: int = 4  # blocks of the network
    dropout: float = 0.3  # fraction of features that are zeroed
    rate: float = 2e-3  # the peak learning rate
    average: float = 0.9995  # decay of the weight average, which generates the samples
    unconditional: float = 0.1  # fraction of images trained on without their digit, for classifier-free guidance
    guidance: float = 1.5  # 1 is none; more gives clearer and less diverse digits
    sampling_steps: int = 40  # from noise to image
    samples: int = 1000  # images to generate at the end
    seed: int = 0  # for the weights, the shuffling, the noise and the dropout
    run: str | None = "runs/diffusion"  # the run directory


@mlax.frozen
class Block(mlax.Composite):
    """A residual block on x (b, d), modulated by the condition c (b, d): (b, d)."""

    width: int
    dropout: float

    def parts(self):
        return {
            "norm": nn.LayerNorm(),
            "set": nn.Linear(2 * self.width, kernel_init=mlax.Zeros()),
            "up": nn.Linear(2 * self.width),
            "drop": nn.Dropout(self.dropout),
            "down": nn.Linear(self.width),
        }

    def wire(self, sub, x, c):
        scale, shift = jnp.split(sub.set(c), 2, axis=-1)
        y = sub.norm(x) * (1 + scale) + shift
        return x + sub.down(sub.drop(ops.gelu(sub.up(y))))


@mlax.frozen
class VelocityField(mlax.Composite):
    """Predict the velocity of each pixel: image (b, 8, 8), time (b,) from 0 to 1 and digit (b,), to (b, 8, 8)."""

    width: int
    depth: int
    dropout: float

    def parts(self):
        block = Block(self.width, self.dropout)
        return {
            "pixels": nn.Linear(self.width),
            "time": nn.MLP((self.width, self.width)),
            "digit": nn.Embed(11, self.width),
            "blocks": mlax.Repeat(block, self.depth, mode="unroll"),
            "norm": nn.LayerNorm(),
            "out": nn.Linear(64, kernel_init=mlax.Zeros()),
        }

    def wire(self, sub, x):
        angles = x["time"][:, None] * np.pi * 2.0 ** np.arange(8, dtype=np.float32)  # (b, 8)
        time = sub.time(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1))
        pixels = sub.pixels(x["image"].reshape(-1, 64))
        y = sub.blocks(pixels, jax.nn.silu(time + sub.digit(x["digit"])))
        return sub.out(sub.norm(y)).reshape(-1, 8, 8)


def load():
    """Images from -1 to 1 and their digits, for training and testing: one fixed split."""
    pixels, digits = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8) / 8 - 1).astype(np.float32)
    x, x_test, y, y_test = train_test_split(
        images, digits.astype(np.int32), test_size=450, stratify=digits, random_state=0
    )
    return {"image": x, "digit": y}, {"image": x_test, "digit": y_test}


def make_objective(model, config):
    """The flow-matching loss: the squared error of the velocity, at a random time between noise and image."""

    def objective(batch, trainables, non_trainables, rng, inference_mode=False):
        image = batch["image"]
        noise_rng, time_rng, label_rng, rng = jax.random.split(rng, 4)
        noise = jax.random.normal(noise_rng, image.shape)
        time = jax.nn.sigmoid(jax.random.normal(time_rng, image.shape[:1]))  # the middle is the hardest
        drop_label = jax.random.bernoulli(label_rng, config.unconditional, time.shape)
        digit = jnp.where(drop_label, UNCONDITIONAL, batch["digit"])
        noisy = noise + time[:, None, None] * (image - noise)
        x = {"image": noisy, "time": time, "digit": digit}
        velocity, non_trainables = model.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return (velocity - (image - noise)) ** 2, non_trainables  # (b, 8, 8)

    return objective


@functools.partial(jax.jit, static_argnames=("model", "steps"))
def sample(model, trainables, digit, rng, guidance, steps):
    """Generate each `digit` (b,) from noise by the midpoint method: images (b, 8, 8) from -1 to 1."""
    labels = jnp.concatenate([digit, jnp.full_like(digit, UNCONDITIONAL)])

    def velocity(image, time):
        x = {"image": jnp.concatenate([image, image]), "time": jnp.full(labels.shape, time), "digit": labels}
        conditional, unconditional = jnp.split(model.fwd(x, trainables, inference_mode=True)[0], 2)
        return unconditional + guidance * (conditional - unconditional)

    def step(image, time):
        midpoint = image + velocity(image, time) * (0.5 / steps)
        return image + velocity(midpoint, time + 0.5 / steps) * (1 / steps), None

    noise = jax.random.normal(rng, (len(digit), 8, 8))
    image, _ = jax.lax.scan(step, noise, jnp.arange(steps, dtype=jnp.float32) / steps)
    return jnp.clip(image, -1, 1)


def score_samples(samples, data, test):
    """The fraction of samples classified as the requested digit, their novelty and their diversity."""
    named = {"samples": samples, "data": data, "test": test}
    flat = {name: each["image"].reshape(-1, 64) for name, each in named.items()}
    classifier = SVC(C=10).fit(flat["data"], data["digit"])

    def nearest(images, others):
        """The mean distance of each image to the nearest of the others."""
        return pairwise_distances(images, others).min(axis=1).mean()

    def spread(images, digits):
        """The mean distance of each image to the nearest other of its digit, among 40 of each."""
        by_digit = [pairwise_distances(images[digits == digit][:40]) for digit in range(10)]
        return np.mean([np.sort(distances, axis=1)[:, 1].mean() for distances in by_digit])

    return {
        "accuracy": float(classifier.score(flat["samples"], samples["digit"])),
        "real_accuracy": float(classifier.score(flat["test"], test["digit"])),
        "novelty": float(nearest(flat["samples"], flat["data"]) / nearest(flat["test"], flat["data"])),
        "diversity": float(spread(flat["samples"], samples["digit"]) / spread(flat["data"], data["digit"])),
    }


def save_grid(path, images):
    """Write the first 100 images to one file, ten by ten."""
    from matplotlib.image import imsave

    grid = np.pad(images[:100], ((0, 0), (1, 1), (1, 1)), constant_values=-1).reshape(10, 10, 10, 10)
    imsave(path, np.kron(grid.swapaxes(1, 2).reshape(100, 100), np.ones((6, 6))), cmap="gray_r", vmin=-1, vmax=1)


def main(config: Config) -> dict[str, float]:
    """Train, sample and score the samples; returns the scores."""
    data, test = load()
    feed = train.Feed(data, config.batch, seed=config.seed)
    model = VelocityField(config.width, config.depth, config.dropout)
    rate = optim.WarmupCosine(config.rate, warmup=config.steps // 20, total=config.steps)
    optimizer = optim.Average(optim.ClipGlobalNorm(optim.AdamW(rate, b2=0.99), 1.0), config.average)
    step = train.step(make_objective(model, config), optimizer)
    weights_rng, rng, sample_rng = jax.random.split(jax.random.key(config.seed), 3)
    time = jax.ShapeDtypeStruct((config.batch,), jnp.float32)
    state = step.init(rng, *model.init(weights_rng, {**feed.example, "time": time}))
    every = max(1, config.steps // 6)
    result = train.fit(
        step,
        state,
        feed,
        steps=config.steps,
        run=config.run,
        evaluate=train.Feed(test, 450),
        evaluate_every=every,
        config=config,
    )

    weights, _ = result.state.eval_variables(optimizer)
    digit = np.arange(config.samples, dtype=np.int32) % 10
    images = sample(model, weights, jnp.asarray(digit), sample_rng, config.guidance, config.sampling_steps)
    images = np.asarray(images)
    if config.run is not None:
        save_grid(Path(config.run) / "digits.png", images)
    scores = {**result.scores, **score_samples({"image": images, "digit": digit}, data, test)}
    print("  ".join(f"{name} {value:.4g}" for name, value in scores.items()))
    return scores


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config))
