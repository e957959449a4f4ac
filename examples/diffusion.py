"""Train a network that draws the handwritten digit one asks for, out of noise: flow matching, with guidance.

    python examples/diffusion.py [--steps 3000] [--run runs/diffusion]     # or: mlax train examples/diffusion.py

takes 75 seconds on two CPU cores. A support vector machine that reads 99.1% of real digits rightly then reads 99.9 to
100% of 1,000 drawn ones as the digit asked for, over three seeds. The drawn ones are 0.89 times as far from the nearest
image trained on as real digits that were kept aside (copies would be 0), and 0.82 times as far from each other as real
ones are. A hundred are in `runs/diffusion/digits.png`. The images come with scikit-learn: nothing is downloaded.
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
from mlax import nn, optim, train

ANY = 10  # stands where no digit is asked for


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that can be chosen; each field is an option on the command line."""

    steps: int = 3000
    batch: int = 256
    width: int = 192
    depth: int = 4
    dropout: float = 0.3
    rate: float = 2e-3
    average: float = 0.9995  # how slowly the average of the weights moves, which is what draws
    any: float = 0.1  # the share of images learned without their digit, which guidance needs
    guidance: float = 1.5  # 1 is none; more draws clearer digits, and fewer kinds of them
    moves: int = 40  # from noise to an image
    drawn: int = 1000
    seed: int = 0  # of the weights, the order of the images, the noise and the dropout
    run: str | None = "runs/diffusion"  # the folder to fill


@mlax.frozen
class Block(mlax.Composite):
    """Change x (b, d) a little, in a way that c (b, d) sets: (x, c) to (x, c)."""

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

    def wire(self, sub, both):
        x, c = both
        scale, shift = jnp.split(sub.set(c), 2, axis=-1)
        y = sub.norm(x) * (1 + scale) + shift
        return x + sub.down(sub.drop(jax.nn.gelu(sub.up(y)))), c


@mlax.frozen
class Painter(mlax.Composite):
    """Say where each pixel should move: image (b, 8, 8), time (b,) from 0 to 1 and digit (b,), to (b, 8, 8)."""

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
        y, _ = sub.blocks((pixels, jax.nn.silu(time + sub.digit(x["digit"]))))
        return sub.out(sub.norm(y)).reshape(-1, 8, 8)


def load():
    """Images from -1 to 1 and their digits, to train on and kept aside: one fixed split."""
    pixels, digits = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8) / 8 - 1).astype(np.float32)
    x, x_test, y, y_test = train_test_split(
        images, digits.astype(np.int32), test_size=450, stratify=digits, random_state=0
    )
    return {"image": x, "digit": y}, {"image": x_test, "digit": y_test}


def objective_of(model, config):
    """How far off `model` is, halfway between noise and an image, about the way from the one to the other."""

    def objective(batch, trainables, non_trainables, rng, inference_mode=False):
        image = batch["image"]
        noise_rng, time_rng, any_rng, rng = jax.random.split(rng, 4)
        noise = jax.random.normal(noise_rng, image.shape)
        time = jax.nn.sigmoid(jax.random.normal(time_rng, image.shape[:1]))  # the middle of the way is the hardest
        digit = jnp.where(jax.random.bernoulli(any_rng, config.any, time.shape), ANY, batch["digit"])
        between = noise + time[:, None, None] * (image - noise)
        x = {"image": between, "time": time, "digit": digit}
        way, non_trainables = model.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return (way - (image - noise)) ** 2, non_trainables  # (b, 8, 8)

    return objective


@functools.partial(jax.jit, static_argnames=("model", "moves"))
def draw(model, trainables, digit, rng, guidance, moves):
    """Draw each `digit` (b,) from noise, by the midpoint rule, in one program: images (b, 8, 8) from -1 to 1."""
    asked = jnp.concatenate([digit, jnp.full_like(digit, ANY)])

    def way(image, time):
        x = {"image": jnp.concatenate([image, image]), "time": jnp.full(asked.shape, time), "digit": asked}
        asked_for, anything = jnp.split(model.fwd(x, trainables, inference_mode=True)[0], 2)
        return anything + guidance * (asked_for - anything)

    def move(image, time):
        middle = image + way(image, time) * (0.5 / moves)
        return image + way(middle, time + 0.5 / moves) * (1 / moves), None

    noise = jax.random.normal(rng, (len(digit), 8, 8))
    image, _ = jax.lax.scan(move, noise, jnp.arange(moves, dtype=jnp.float32) / moves)
    return jnp.clip(image, -1, 1)


def judge(drawn, data, test):
    """How many of the `drawn` digits are what was asked for, and how new and how various they are."""
    flat = {name: each["image"].reshape(-1, 64) for name, each in (("drawn", drawn), ("data", data), ("test", test))}
    reader = SVC(C=10).fit(flat["data"], data["digit"])

    def away(images, others):
        """The mean distance of each image to the nearest of the others."""
        return pairwise_distances(images, others).min(axis=1).mean()

    def apart(images, digits):
        """The mean distance of each image to the nearest other of its digit, among 40 of each."""
        of_each = [pairwise_distances(images[digits == digit][:40]) for digit in range(10)]
        return np.mean([np.sort(distances, axis=1)[:, 1].mean() for distances in of_each])

    return {
        "right": float(reader.score(flat["drawn"], drawn["digit"])),
        "real_right": float(reader.score(flat["test"], test["digit"])),
        "novelty": float(away(flat["drawn"], flat["data"]) / away(flat["test"], flat["data"])),
        "variety": float(apart(flat["drawn"], drawn["digit"]) / apart(flat["data"], data["digit"])),
    }


def picture(path, images):
    """Write 100 images as one, ten by ten."""
    from matplotlib.image import imsave

    grid = np.pad(images[:100], ((0, 0), (1, 1), (1, 1)), constant_values=-1).reshape(10, 10, 10, 10)
    imsave(path, np.kron(grid.swapaxes(1, 2).reshape(100, 100), np.ones((6, 6))), cmap="gray_r", vmin=-1, vmax=1)


def main(config: Config) -> dict[str, float]:
    """Train, draw and judge; gives the scores."""
    data, test = load()
    feed = train.Feed(data, config.batch, seed=config.seed)
    model = Painter(config.width, config.depth, config.dropout)
    rate = optim.WarmupCosine(config.rate, warmup=config.steps // 20, total=config.steps)
    optimizer = optim.Average(optim.ClipGlobalNorm(optim.AdamW(rate, b2=0.99), 1.0), config.average)
    step = train.step(objective_of(model, config), optimizer)
    weights_rng, rng, draw_rng = jax.random.split(jax.random.key(config.seed), 3)
    time = jax.ShapeDtypeStruct((config.batch,), jnp.float32)
    state = step.init(rng, *model.init(weights_rng, {**feed.example, "time": time}))
    often = max(1, config.steps // 6)
    fitted = train.fit(
        step,
        state,
        feed,
        steps=config.steps,
        run=config.run,
        evaluate=train.Feed(test, 450),
        evaluate_every=often,
        config=config,
    )

    weights = optimizer.averaged(fitted.state.optimizer, fitted.state.trainables)
    digit = np.arange(config.drawn, dtype=np.int32) % 10
    drawn = np.asarray(draw(model, weights, jnp.asarray(digit), draw_rng, config.guidance, config.moves))
    if config.run is not None:
        picture(Path(config.run) / "digits.png", drawn)
    scores = {**fitted.scores, **judge({"image": drawn, "digit": digit}, data, test)}
    print("  ".join(f"{name} {value:.4g}" for name, value in scores.items()))
    return scores


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config))
