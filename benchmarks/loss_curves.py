"""Claim: over 300 steps of GPT-2, the loss is that of the plain form within the noise of bfloat16, for each fast form.

Plain is the same model, unrolled, with the gradients that JAX derives, attention by XLA, no kernels of Pallas, and
Optax's loss of float32 logits. Each hand-written derivative and each kernel is switched in alone, then all of them. All
learn the same text, a random walk over the vocabulary, compute in bfloat16, and warm the learning rate up.

The noise of bfloat16 is measured: each form trains from two or more roundings of the same initial weights, the plain
one from twice as many. Compared are means over 20 steps and over these roundings. The standard error of a difference
follows from the spread among the roundings, pooled over all forms, and a form may differ from the plain one by four of
them, or by 0.001 nats. A control, which loses one in 24 tiles of the gradients of the first product of each MLP, has to
differ by more.

There are two plain forms, and what is between them is no gap: inside of a fusion XLA leaves out the rounding to
bfloat16 of what it does not write to memory, so that a form with other fusions, or with kernels, has others. In the
second plain form it leaves out none (`xla_allow_excess_precision=False`).

    python -m benchmarks.loss_curves --batch 4 --out runs/curves.json    # 7 minutes on an H200; again, it goes on
    python -m benchmarks.loss_curves --batch 4 --only "kernels of MLPs" "kernels of projections"
    python -m benchmarks.loss_curves --depth 1 --width 64 --vocabulary 301 --batch 4 --length 32    # on a CPU

It exits with an error if a curve leaves the noise, or if the control does not. What a GPU gave is in
docs/design/gpu-kernels.md.
"""

import argparse
import concurrent.futures
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mlax
from benchmarks.forms import FORMS, Form, apply_form, use
from benchmarks.harness import FAILED, print_table, verdict
from mlax import ops, optim, zoo

PLAIN, ROUNDED, CONTROL = "plain", "plain, every result rounded", "control: tiles of gradients lost"
ROUND_ALL = {"xla_allow_excess_precision": False}
WINDOW = 20  # steps whose mean is compared
BOUND = 4.0  # standard errors: 15 forms in 15 windows are 225 comparisons
FLOOR = 0.001  # of the bound, in nats
# the rate is warmed up: at the full one from the start, curves of equal programs part after 20 steps of small batches
OPTIMIZER = optim.AdamW(optim.WarmupCosine(3e-4, warmup=100, total=10_000))


def main(options: argparse.Namespace) -> None:
    forms = {PLAIN: Form(), ROUNDED: Form(), CONTROL: Form(), **choose_forms(options)}
    lowered = {name: lower(name, form, options) for name, form in forms.items()}  # one at a time: they patch modules
    with concurrent.futures.ThreadPoolExecutor() as pool:
        started = {
            name: pool.submit(each.compile, compiler_options=ROUND_ALL if name == ROUNDED else None)
            for name, each in lowered.items()
        }
    compiled = {name: each.result() for name, each in started.items()}
    found = json.loads(Path(options.out).read_text()) if options.out and Path(options.out).exists() else {}
    curves = {name: found.get(name, []) for name in forms}
    for rounding in range(2 * options.roundings):
        weights = initialize(options, rounding)
        for name in forms if rounding < options.roundings else (PLAIN, ROUNDED):
            if len(curves[name]) <= rounding:
                curves[name].append(run(compiled[name], weights, options))
                if options.out:
                    Path(options.out).write_text(json.dumps(curves))
    title = f"Loss over {options.steps} steps of GPT-2, {options.depth} x {options.width}, on {jax.devices()[0]}"
    header = ("form", "first 20", "last 20", "largest gap", "standard errors", "")
    print_table(title, header, compare(curves))
    sys.exit(bool(FAILED))


def compare(curves: dict[str, list[list[float]]]) -> list[tuple[str, ...]]:
    """A row of the table for each form, from the losses of its roundings."""
    windows = {name: np.reshape(each, (len(each), -1, WINDOW)).mean(2) for name, each in curves.items()}
    squares = sum(each.var(0) * len(each) for each in windows.values())
    variance = squares / sum(len(each) - 1 for each in windows.values())  # pooled, of each window
    plain = np.stack([windows[name].mean(0) for name in (PLAIN, ROUNDED)])
    rows = []
    for name, each in windows.items():
        mean, count = each.mean(0), 1 / len(each) + 1 / len(windows[PLAIN])
        error = np.maximum(np.sqrt(variance * count), FLOOR / BOUND)
        gaps = np.abs(mean - plain[0]) if name == ROUNDED else np.abs(mean - np.clip(mean, plain.min(0), plain.max(0)))
        ratio = (gaps / error).max()
        claim = ""
        if name == PLAIN:
            claim = f"{BOUND:g} standard errors are {BOUND * error[0]:.4f} to {BOUND * error.max():.4f} nats"
        elif name == CONTROL:
            claim = verdict(f"more than {BOUND:g}", ratio > BOUND)
        elif name != ROUNDED:
            claim = verdict(f"at most {BOUND:g}", ratio <= BOUND)
        rows.append((name, f"{mean[0]:.4f}", f"{mean[-1]:.4f}", f"{gaps.max():.4f}", f"{ratio:.1f}", claim))
    return rows


def choose_forms(options: argparse.Namespace) -> dict[str, Form]:
    """The forms that are compared; where there are no kernels, those that need none, and all forms at once."""
    chosen = {name: form for name, form in FORMS.items() if not options.only or name in options.only}
    example = jax.ShapeDtypeStruct((options.batch * options.length, options.width), jnp.bfloat16)
    has_kernels = ops.kernel_backend(example, accum_dtype="float32").startswith("mosaic")
    return {
        name: form for name, form in chosen.items() if has_kernels or not form.needs_kernels or name.startswith("all")
    }


def lower(name: str, form: Form, options: argparse.Namespace) -> Any:
    """The training step: (trainables, state, number of the step) to these and the loss."""
    model = make_model(form, options)

    def step(trainables: Any, state: Any, number: jax.Array) -> Any:
        text = draw_text(number, options)

        def mean_loss(trainables: Any) -> jax.Array:
            if form.has_head:
                return model.fwd((text[:, :-1], None, text[:, 1:]), trainables)[0].mean()
            logits, _ = model.fwd(text[:, :-1], trainables)
            return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(mean_loss)(trainables)
        if name == CONTROL:
            gradients = jax.tree.map_with_path(lose_tile, gradients)
        trainables, state = OPTIMIZER.update(gradients, state, trainables)
        return trainables, state, loss

    with use(form, options.width):
        trainables = jax.eval_shape(lambda: initialize(options, 0))
        state = jax.eval_shape(OPTIMIZER.init, trainables)
        return jax.jit(step, donate_argnums=(0, 1)).lower(trainables, state, jax.ShapeDtypeStruct((), np.int32))


def run(step: Any, trainables: Any, options: argparse.Namespace) -> list[float]:
    """The losses of all steps."""
    trainables = jax.tree.map(jnp.copy, trainables)  # which are donated
    state, losses = OPTIMIZER.init(trainables), []
    for number in range(options.steps):
        trainables, state, loss = step(trainables, state, jnp.asarray(number, np.int32))
        losses.append(loss)
    return np.asarray(jnp.stack(losses)).tolist()


def lose_tile(path: Any, gradient: jax.Array) -> jax.Array:
    """The gradient as a kernel would leave it that forgets the first of 24 tiles of columns of an MLP."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    lost = gradient.shape[-1] // 24 if name.endswith("up/kernel") else 0
    return gradient.at[..., :lost].set(0) if lost else gradient


def make_model(form: Form, options: argparse.Namespace) -> mlax.Layer:
    model = zoo.GPT2(
        vocabulary=options.vocabulary,
        positions=options.length,
        width=options.width,
        depth=options.depth,
        heads=options.width // 64 or 1,
    )
    return apply_form(model, form)


def initialize(options: argparse.Namespace, rounding: int) -> Any:
    """Weights, the same for all forms; other than 0, `rounding` seeds factors that round them to other bfloat16."""
    example = jax.ShapeDtypeStruct((1, options.length), np.int32)
    trainables, _ = make_model(Form(), options).init(jax.random.key(0), example)
    if rounding == 0:
        return trainables
    leaves, tree = jax.tree.flatten(trainables)
    keys = jax.random.split(jax.random.key(rounding), len(leaves))
    half = 2.0**-9  # of the spacing of bfloat16, relative
    return tree.unflatten(
        [
            leaf * jax.random.uniform(key, leaf.shape, minval=1 - half, maxval=1 + half)
            for key, leaf in zip(keys, leaves, strict=True)
        ]
    )


def draw_text(number: jax.Array, options: argparse.Namespace) -> jax.Array:
    """Tokens (b, t + 1): each is the last one plus a small random step, so that there is something to learn."""
    key, first = jax.random.split(jax.random.fold_in(jax.random.key(1), number))
    shape = (options.batch, options.length + 1)
    steps = (
        jax.random.randint(key, shape, 0, 4).at[:, 0].set(jax.random.randint(first, shape[:1], 0, options.vocabulary))
    )
    return (jnp.cumsum(steps, 1) % options.vocabulary).astype(np.int32)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"steps": 300, "depth": 12, "width": 768, "vocabulary": 50_257, "batch": 32}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--roundings", type=int, default=2, help="of the initial weights, for each form")
    parser.add_argument("--only", nargs="+", default=[], choices=FORMS, metavar="FORM", help="besides the plain form")
    parser.add_argument("--out", help="a file for the curves, JSON; those that it has are not computed again")
    main(parser.parse_args())
