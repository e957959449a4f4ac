"""Train one network in float32, bfloat16 and float16, and compare them: a table, and a dtype audit of each.

    python examples/mixed_precision.py [--steps 440] [--seed 0] [--run runs/mixed_precision]

takes about a minute on two CPU cores, writes a run directory for each, and prints this, on scikit-learn's digits:

    computed in  accuracy  residuals  skipped steps
    float32         99.1%   2.95 MiB              0
    bfloat16        98.9%   1.80 MiB              0
    float16         99.1%   1.80 MiB              9

The weights are float32 in all three, and so are the statistics of the norm: `dtypes.mixed_bfloat16` decides where a
narrow dtype is safe, and `dtypes.audit` lists every operation that is not in the requested dtype. The exponent range of
float16 is so small that small gradients underflow and large ones overflow: `train.DynamicLossScale` searches for the
loss scale in between, and each step that overflows is skipped and counted.
"""

import dataclasses
import math

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mlax
from mlax import dtypes, nn, optim, train


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings; each field is a command-line option."""

    steps: int = 440  # for each of the three; an epoch has 22
    batch: int = 64  # images per step
    rate: float = 3e-3  # the peak learning rate
    width: int = 32  # channels of the convolutions
    seed: int = 0  # for the weights and the shuffling, the same for all three
    run: str = "runs/mixed_precision"  # the parent of the three run directories


def cnn(width):
    """The network, independent of dtypes: (b, 8, 8, 1) pixels from 0 to 1 in, (b, 10) logits out."""

    def conv(features):
        return mlax.Series(conv=nn.Conv(features, 3), relu=jax.nn.relu)

    return mlax.Series(
        edges=conv(width),
        corners=conv(width),
        halve=nn.MaxPool(2),  # (b, 4, 4, width)
        strokes=conv(2 * width),
        flat=nn.Flatten(),
        norm=nn.LayerNorm(),
        head=nn.Linear(10),
    )


def precisions(model):
    """The model in each precision, with its loss scaling."""
    return {
        "float32": (model, None),
        "bfloat16": (dtypes.mixed_bfloat16(model), None),  # the exponent range of float32: no loss scaling needed
        "float16": (dtypes.mixed_float16(model), train.DynamicLossScale(scale=2.0**24, every=100)),
    }


def load():
    """The training and test digits: one fixed, stratified split."""
    pixels, digits = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    x, x_test, y, y_test = train_test_split(
        images, digits.astype(np.int32), test_size=450, stratify=digits, random_state=0
    )
    return {"image": x, "digit": y}, {"image": x_test, "digit": y_test}


def residual_bytes(function, *args):
    """The bytes of residuals that a function stores for its backward pass, without computing anything."""
    arrays = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args))
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


def summarize_audit(dtype, function, *args):
    """A summary of the audit of a function that should compute in `dtype`, with its first finding."""
    violations = dtypes.audit(function, *args, dtype=dtype)
    if not violations:
        return f"all operations are in {dtype}"
    where = " and ".join(dict.fromkeys(violation.path or "the output" for violation in violations))
    return f"{len(violations)} operations are not in {dtype}, in {where}:\n  {violations[0]}\n  ..."


def train_in_precision(name, model, scaling, config):
    """Train and evaluate the network in one precision; returns a row of the table."""
    data, test = load()
    feed, evaluate = train.Feed(data, config.batch, seed=config.seed), train.Feed(test, 450)

    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        logits, non_trainables = model.fwd(batch["image"], trainables, non_trainables, inference_mode=inference_mode)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["digit"])  # (b,), always in float32
        return {"loss": loss, "accuracy": train.accuracy(logits, batch["digit"])}, non_trainables

    optimizer = optim.AdamW(optim.WarmupCosine(config.rate, warmup=min(50, config.steps // 2), total=config.steps))
    step = train.step(objective, optimizer, scaling=scaling)
    trainables, _ = model.init(jax.random.key(config.seed), feed.example["image"])

    def forward(trainables, images):
        return model.fwd(images, trainables)[0]

    print(summarize_audit(name, forward, trainables, feed.example["image"]))
    residuals = residual_bytes(forward, trainables, feed.example["image"])
    state = step.init(jax.random.key(config.seed), trainables)
    run = f"{config.run}/{name}"
    result = train.fit(step, state, feed, steps=config.steps, run=run, evaluate=evaluate, config=config)
    return {"accuracy": result.scores["accuracy"], "residuals": residuals, "skipped": int(result.state.skipped)}


def main(config: Config):
    """Train in each precision and print the table; returns its values by name."""
    models = precisions(cnn(config.width))
    rows = {name: train_in_precision(name, model, scaling, config) for name, (model, scaling) in models.items()}
    print("\ncomputed in  accuracy  residuals  skipped steps")
    for name, row in rows.items():
        size = f"{row['residuals'] / 2**20:.2f} MiB"
        print(f"{name:11}  {row['accuracy']:8.1%}  {size:>9}  {row['skipped']:13}")
    return {f"{name}_{column}": value for name, row in rows.items() for column, value in row.items()}


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config))
