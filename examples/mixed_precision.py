"""Train one network in float32, in bfloat16 and in float16, and see what that changes: a table, and an audit.

    python examples/mixed_precision.py [--steps 440] [--seed 0] [--run runs/mixed_precision]

takes about a minute on two CPU cores, leaves a run folder for each, and shows this, on scikit-learn's digits:

    computed in  accuracy  kept for the backward pass  skipped steps
    float32         99.1%                    2.95 MiB              0
    bfloat16        98.9%                    1.80 MiB              0
    float16         99.1%                    1.80 MiB              9

The weights are float32 in all three, and so are the statistics of the norm: `dtypes.mixed_bfloat16` says where narrow
numbers are safe, and `dtypes.audit` lists every operation that is not in the dtype that was asked for. float16 has so
few exponents that small gradients vanish and large ones overflow: `train.DynamicScaling` looks for the scale in
between, and each step that was too large is skipped and counted.
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
    """Everything that can be chosen; each field is an option on the command line."""

    steps: int = 440  # batches to train on, in each of the three; an epoch has 22
    batch: int = 64
    rate: float = 3e-3
    width: int = 32
    seed: int = 0  # of the weights and the order of the images, the same for all three
    run: str = "runs/mixed_precision"  # the folder of the three folders


def reader(width):
    """The network, with no word about dtypes in it: (b, 8, 8, 1) pixels from 0 to 1 in, (b, 10) logits out."""

    def conv(features):
        return mlax.Series(conv=nn.Conv(features, 3), relu=mlax.F(jax.nn.relu))

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
    """The model in each precision, and the scaling of the loss that goes with it."""
    return {
        "float32": (model, None),
        "bfloat16": (dtypes.mixed_bfloat16(model), None),  # as many exponents as float32 has: nothing to scale
        "float16": (dtypes.mixed_float16(model), train.DynamicScaling(scale=2.0**24, every=100)),
    }


def load():
    """The digits to train on and to test on: one fixed split, with each digit in proportion."""
    pixels, digits = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    x, x_test, y, y_test = train_test_split(
        images, digits.astype(np.int32), test_size=450, stratify=digits, random_state=0
    )
    return {"image": x, "digit": y}, {"image": x_test, "digit": y_test}


def kept(function, *args):
    """The bytes that a function keeps from its forward pass for its backward pass; nothing is computed."""
    arrays = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args))
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


def audited(dtype, function, *args):
    """What the audit says of a function that is to compute in `dtype`, in a few words and its first line."""
    departures = dtypes.audit(function, *args, dtype=dtype)
    if not departures:
        return f"all operations are in {dtype}"
    where = " and ".join(dict.fromkeys(departure.path or "the output" for departure in departures))
    return f"{len(departures)} operations are not in {dtype}, those of {where}:\n  {departures[0]}\n  ..."


def compared(name, model, scaling, config):
    """Train and test the network in one precision: a row of the table."""
    data, test = load()
    feed, evaluate = train.Feed(data, config.batch, seed=config.seed), train.Feed(test, 450)

    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        logits, non_trainables = model.fwd(batch["image"], trainables, non_trainables, inference_mode=inference_mode)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["digit"])  # (b,), always in float32
        return {"loss": loss, "accuracy": logits.argmax(-1) == batch["digit"]}, non_trainables

    optimizer = optim.AdamW(optim.WarmupCosine(config.rate, warmup=min(50, config.steps // 2), total=config.steps))
    step = train.step(objective, optimizer, scaling=scaling)
    trainables, _ = model.init(jax.random.key(config.seed), feed.example["image"])

    def forward(trainables, images):
        return model.fwd(images, trainables)[0]

    print(audited(name, forward, trainables, feed.example["image"]))
    kept_bytes = kept(forward, trainables, feed.example["image"])
    state = step.init(jax.random.key(config.seed), trainables)
    run = f"{config.run}/{name}"
    fitted = train.fit(step, state, feed, steps=config.steps, run=run, evaluate=evaluate, config=config)
    return {"accuracy": fitted.scores["accuracy"], "kept": kept_bytes, "skipped": int(fitted.state.skipped)}


def main(config: Config):
    """Train in each precision and show the table; gives its numbers by name."""
    models = precisions(reader(config.width))
    rows = {name: compared(name, model, scaling, config) for name, (model, scaling) in models.items()}
    print("\ncomputed in  accuracy  kept for the backward pass  skipped steps")
    for name, row in rows.items():
        size = f"{row['kept'] / 2**20:.2f} MiB"
        print(f"{name:11}  {row['accuracy']:8.1%}  {size:>26}  {row['skipped']:13}")
    return {f"{name}_{column}": value for name, row in rows.items() for column, value in row.items()}


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config))
