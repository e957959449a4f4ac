"""Train a small network on scikit-learn's 1,797 handwritten digits: a whole mlax program in one file.

    python examples/digits.py [--epochs 40] [--seed 0] [--out runs/digits]

takes about 15 seconds on two CPU cores and reads 98 to 99% of the 450 test images rightly. It leaves curves,
predictions and a report in `runs/digits`. The data comes with scikit-learn: nothing is downloaded.
"""

import argparse
import contextlib
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mlax
from mlax import nn

BATCH, RATE, DECAY = 64, 2e-3, 0.05
BLUE, RED = "#0072B2", "#D55E00"  # apart for colour-blind eyes too


@mlax.frozen
class Reader(mlax.Composite):
    """Read the digit in each image: (b, 8, 8) pixels from 0 to 1 in, (b, 10) logits out."""

    width: int = 128
    depth: int = 2
    dropout: float = 0.1

    def parts(self):
        block = mlax.Series(
            norm=nn.LayerNorm(),
            up=nn.Linear(2 * self.width),
            gelu=mlax.F(jax.nn.gelu),
            drop=nn.Dropout(self.dropout),
            down=nn.Linear(self.width),
        )
        return {
            "embed": nn.Linear(self.width),
            "blocks": mlax.Repeat(mlax.Residual(block), self.depth),
            "norm": nn.LayerNorm(),
            "head": nn.Linear(10),
        }

    def wire(self, sub, x):
        x = sub.embed(x.reshape(len(x), -1))  # (b, d)
        return sub.head(sub.norm(sub.blocks(x)))


def load():
    """Images and digits to train on, and others to test on: one fixed split, with each digit in proportion."""
    pixels, digits = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 8, 8).astype(np.float32) / 16
    x, x_test, y, y_test = train_test_split(
        images, digits.astype(np.int32), test_size=450, stratify=digits, random_state=0
    )
    return jax.device_put(((x, y), (x_test, y_test)))


def shifted(images, rng):
    """Each image moved by up to one pixel along each axis: what it shows stays, so there is more to learn from."""
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1)))
    corners = jax.random.bernoulli(rng, shape=(2, len(images), 2)).sum(0)  # 0, 1 or 2; half are 1, no move
    return jax.vmap(lambda image, corner: jax.lax.dynamic_slice(image, corner, (8, 8)))(padded, corners)


@jax.jit(static_argnames=("model", "optimizer"))
def epoch(model, optimizer, trainables, non_trainables, state, rng, images, digits):
    """Train on all images once, in shuffled batches: all the steps in one compiled call."""

    def step(carry, drawn):
        trainables, non_trainables, state = carry
        rng, chosen = drawn
        shift_rng, fwd_rng = jax.random.split(rng)
        x, y = shifted(images[chosen], shift_rng), digits[chosen]

        def loss(trainables):
            logits, new = model.fwd(x, trainables, non_trainables, rng=fwd_rng)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new

        (value, non_trainables), grads = jax.value_and_grad(loss, has_aux=True)(trainables)
        updates, state = optimizer.update(grads, state, trainables)
        return (optax.apply_updates(trainables, updates), non_trainables, state), value

    order_rng, step_rng = jax.random.split(rng)
    steps = len(images) // BATCH
    order = jax.random.permutation(order_rng, len(images))[: steps * BATCH].reshape(steps, BATCH)
    carry = (trainables, non_trainables, state)
    carry, losses = jax.lax.scan(step, carry, (jax.random.split(step_rng, steps), order))
    return *carry, losses.mean()


@jax.jit(static_argnames="model")
def predict(model, trainables, non_trainables, images):
    """The likeliest digit for each image."""
    logits, _ = model.fwd(images, trainables, non_trainables, inference_mode=True)
    return logits.argmax(-1)


def train(model, data, test, epochs, seed):
    """Train from scratch: the variables, and for each epoch its loss, train accuracy and test accuracy."""
    init_rng, train_rng = jax.random.split(jax.random.key(seed))
    trainables, non_trainables = model.init(init_rng, data[0])
    steps = len(data[0]) // BATCH  # in each epoch
    optimizer = optax.adamw(optax.cosine_decay_schedule(RATE, epochs * steps), weight_decay=DECAY)
    state = optimizer.init(trainables)
    history = []
    with progress(epochs * steps) as show:
        for rng in jax.random.split(train_rng, epochs):
            trainables, non_trainables, state, loss = epoch(
                model, optimizer, trainables, non_trainables, state, rng, *data
            )
            right = [predict(model, trainables, non_trainables, x) == y for x, y in (data, test)]
            history.append((loss.item(), *(each.mean().item() for each in right)))
            show(len(history) * steps, *history[-1])
    return trainables, non_trainables, history


@contextlib.contextmanager
def progress(steps):
    """Give a function that shows how far training is: on a bar in a terminal, else on a line each tenth."""
    terminal = sys.stdout.isatty()
    words = TextColumn("step {task.completed}/{task.total}  {task.description}")
    left = TimeRemainingColumn(compact=True)
    with Progress(BarColumn(), words, left, TextColumn("left"), disable=not terminal) as bar:
        task = bar.add_task("compiling", total=steps)

        def show(step, loss, train_accuracy, test_accuracy):
            tenths = 10 * bar.tasks[task].completed // steps
            said = f"loss {loss:.4f}  accuracy {train_accuracy:.1%} train, {test_accuracy:.1%} test"
            bar.update(task, completed=step, description=said)
            if not terminal and 10 * step // steps > tenths:
                print(f"{words.render(bar.tasks[task])}  {left.render(bar.tasks[task])} left", flush=True)

        yield show


def draw_curves(path, history):
    """Draw the loss and both accuracies over the epochs."""
    from matplotlib.figure import Figure

    losses, train_accuracies, test_accuracies = zip(*history, strict=True)
    epochs = range(1, len(history) + 1)
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.semilogy(epochs, losses, ".-", color=BLUE)
    left.set(title="Training loss", xlabel="epoch", ylabel="cross-entropy")
    right.plot(epochs, train_accuracies, ".-", color=BLUE, label="train")
    right.plot(epochs, test_accuracies, ".--", color=RED, label="test")
    right.set(title="Accuracy", xlabel="epoch")
    right.yaxis.set_major_formatter("{x:.0%}")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def draw_predictions(path, images, digits, predicted):
    """Draw 40 test images, the wrongly read ones first and framed in red."""
    from matplotlib.figure import Figure

    wrong = predicted != digits
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    figure.suptitle(f"Predicted / true digit: {wrong.sum()} of {len(wrong)} test images are wrong, in red")
    for axes, i in zip(figure.subplots(4, 10).flat, np.argsort(~wrong, stable=True), strict=False):
        axes.imshow(images[i], cmap="gray_r")
        axes.set(xticks=[], yticks=[])
        colour, weight = (RED, "bold") if wrong[i] else ("black", "normal")
        axes.set_title(f"{predicted[i]} / {digits[i]}", color=colour, weight=weight)
        axes.spines[:].set(color=colour, linewidth=3 if wrong[i] else 0.5)
    figure.savefig(path, dpi=150)


def write_report(path, model, trainables, history, seed, seconds):
    """Write down what was trained, how, and what came out."""
    loss, train_accuracy, test_accuracy = history[-1]
    parts = "\n".join(f"{name + ':':8}{part}" for name, part in model.parts().items())
    path.write_text(f"""# Handwritten digits

The test accuracy is **{test_accuracy:.2%}** after {len(history)} epochs, in {seconds:.1f} seconds.

| | |
|---|---|
| final training loss | {loss:.4f} |
| train accuracy | {train_accuracy:.2%} |
| test accuracy | {test_accuracy:.2%} |
| parameters | {mlax.count(trainables):,} |
| optimizer | AdamW, rate {RATE} falling by a cosine to 0, decay {DECAY}, batches of {BATCH} |
| seed | {seed} |

```
{parts}
```

![curves](curves.png)

![predictions](predictions.png)
""")


def whole(least, most):
    """A parser of whole numbers from `least` to `most`, for argparse."""

    def parse(text):
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most:,}")
        return int(text)

    return parse


def main(argv=None):
    """Train, test, and leave pictures and a report."""
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--epochs", type=whole(1, 10_000), default=40, help="passes over the images (40)")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="of weights, order, noise (0)")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="where to write (runs/digits)")
    options = parser.parse_args(argv)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: cannot make this folder: {error}")

    started = time.perf_counter()
    model, (data, test) = Reader(), load()
    trainables, non_trainables, history = train(model, data, test, options.epochs, options.seed)
    predicted = predict(model, trainables, non_trainables, test[0])
    draw_curves(options.out / "curves.png", history)
    draw_predictions(options.out / "predictions.png", *map(np.asarray, (*test, predicted)))
    seconds = time.perf_counter() - started
    write_report(options.out / "report.md", model, trainables, history, options.seed, seconds)
    print(f"test accuracy {history[-1][-1]:.2%} in {seconds:.1f} s")
    for name in ("curves.png", "predictions.png", "report.md"):
        print(options.out / name)


if __name__ == "__main__":
    main()
