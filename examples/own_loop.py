"""A training loop of one's own, with no `fit`: a feed, a step and checkpoints, and the rest is a `for`.

    python examples/own_loop.py [--epochs 30] [--seed 0] [--run runs/own_loop]

It takes about 10 seconds on two CPU cores and reads 98.0% of 450 handwritten digits of scikit-learn rightly. Kill it
at any moment, by `kill -9` too, and give the same command again: it goes on after the last epoch that was saved, and
ends with the same weights, to the bit. For that nothing but `state` has to be kept: the order of the images and the
key of each step are functions of the seed and of the number of the step, and `state.step` is that number.
"""

import dataclasses

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import mlax
from mlax import nn, optim, train


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that can be chosen; each field is an option on the command line."""

    epochs: int = 30  # passes over the 1,347 images; each has 22 batches of 64
    rate: float = 2e-3
    seed: int = 0  # of the weights, the order of the images and the dropout
    run: str = "runs/own_loop"  # the folder for the checkpoints


MODEL = mlax.Series(
    hidden=nn.Linear(256), relu=mlax.F(jax.nn.relu), norm=nn.LayerNorm(), drop=nn.Dropout(0.3), head=nn.Linear(10)
)


def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
    """The loss and the accuracy, (b,) each: what a step minimises, and what it only watches."""
    logits, new = MODEL.fwd(batch["pixels"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["digit"])
    return {"loss": loss, "accuracy": logits.argmax(-1) == batch["digit"]}, new


def main(config: Config):
    """Train, from where the last run was left; gives the scores on the test images."""
    pixels, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    source = {"pixels": pixels[order].astype(np.float32) / 16, "digit": digits[order].astype(np.int32)}
    feed = train.Feed({name: array[450:] for name, array in source.items()}, batch=64, seed=config.seed)
    test = train.Feed({name: array[:450] for name, array in source.items()}, batch=450)

    steps = config.epochs * feed.steps
    step = train.step(objective, optim.AdamW(optim.WarmupCosine(config.rate, warmup=min(50, steps // 2), total=steps)))
    init_rng, rng = jax.random.split(jax.random.key(config.seed))
    state = step.init(rng, *MODEL.init(init_rng, feed.example["pixels"]))

    checkpoints = train.Checkpoints(config.run)
    if checkpoints.steps():
        state = checkpoints.restore(state).tree
    begun = int(state.step)
    for at, batch in enumerate(feed.stream(begun, steps), begun + 1):
        state, metrics = step(state, batch)  # returns at once: the device is still at work
        if at % feed.steps == 0:
            loss, scores = metrics.numbers()["loss"], step.evaluation(state, test.epoch())
            checkpoints.save(at, state, metrics=scores)  # a thread writes it while training goes on
            print(f"{at}/{steps}  loss {loss:.3f}  accuracy {scores['accuracy']:.1%}", flush=True)
    checkpoints.wait()  # until the last one is on the disk
    return step.evaluation(state, test.epoch())


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config))
