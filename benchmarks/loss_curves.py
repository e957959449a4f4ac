"""Claim: over 300 steps of GPT-2, the loss is that of the plain form within the noise of bfloat16, for each fast form.

Plain is the same model, unrolled, with the gradients that JAX derives, attention by XLA, no kernels of Pallas, and
Optax's loss of float32 logits. Each hand-written derivative and each kernel is switched in alone, then all of them. All
runs have the same initial weights, learn the same text, a random walk over the vocabulary, compute in bfloat16, and
warm the learning rate up. Compared are means over 20 steps. The noise is the largest difference that other roundings of
the initial weights to bfloat16 make; a curve may differ from the plain one by twice as much.

    python -m benchmarks.loss_curves                                     # 10 minutes on an H200
    python -m benchmarks.loss_curves --batch 4                           # 4 minutes, half of them to compile
    python -m benchmarks.loss_curves --batch 4 --only "kernels of MLPs" "kernels of projections"
    python -m benchmarks.loss_curves --depth 1 --width 64 --vocabulary 301 --batch 4 --length 32    # on a CPU

It exits with an error if a curve leaves the noise. Typical, by the last command on 2 cores, JAX 0.10.2: the loss falls
from 5.54 to 3.84; the means differ by at most 0.0006 with another rounding, and by 0.0001 with any form. What a GPU
gave before the warm-up is in docs/design/gpu-kernels.md.
"""

import argparse
import concurrent.futures
import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mlax
from benchmarks.forms import FORMS, Form, apply_form, use
from benchmarks.harness import FAILED, print_table, verdict
from mlax import ops, optim, zoo

PLAIN = "plain"
ROUNDINGS = {f"plain, other rounding {seed}": Form(rounding=seed) for seed in (1, 2, 3, 4)}
WINDOW = 20  # steps whose mean is compared
TOLERANCE = 2.0  # times the noise
FLOOR = 0.001  # of the noise, in nats
# the rate is warmed up: at the full one from the start, curves of equal programs part after 20 steps of small batches
OPTIMIZER = optim.AdamW(optim.WarmupCosine(3e-4, warmup=100, total=10_000))


def main(options: argparse.Namespace) -> None:
    forms = {PLAIN: Form(), **ROUNDINGS, **choose_forms(options)}
    lowered = {name: lower(form, options) for name, form in forms.items()}  # one at a time: they patch modules
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = dict(zip(lowered, pool.map(lambda each: each.compile(), lowered.values()), strict=True))
    curves = {name: run(compiled[name], form, options) for name, form in forms.items()}
    if options.out:
        with open(options.out, "w") as file:
            json.dump({name: curve.tolist() for name, curve in curves.items()}, file)
    means = {name: curve.reshape(-1, WINDOW).mean(1) for name, curve in curves.items()}
    gaps = {name: np.abs(mean - means[PLAIN]).max() for name, mean in means.items()}
    noise = max(FLOOR, *(gaps[name] for name in ROUNDINGS))
    claims = {
        name: verdict(f"within {TOLERANCE:g} x noise", gap <= TOLERANCE * noise)
        for name, gap in gaps.items()
        if name in FORMS
    }
    table = [
        (name, f"{mean[0]:.4f}", f"{mean[-1]:.4f}", f"{gaps[name]:.4f}", claims.get(name, ""))
        for name, mean in means.items()
    ]
    title = f"Loss over {options.steps} steps of GPT-2, {options.depth} x {options.width}, on {jax.devices()[0]}"
    print_table(title, ("form", "first 20", "last 20", "largest gap", ""), table)
    sys.exit(bool(FAILED))


def choose_forms(options: argparse.Namespace) -> dict[str, Form]:
    """The forms that are compared; where there are no kernels, those that need none, and all forms at once."""
    chosen = {name: form for name, form in FORMS.items() if not options.only or name in options.only}
    example = jax.ShapeDtypeStruct((options.batch * options.length, options.width), jnp.bfloat16)
    has_kernels = ops.kernel_backend(example, accum_dtype="float32").startswith("mosaic")
    return {
        name: form for name, form in chosen.items() if has_kernels or not form.needs_kernels or name.startswith("all")
    }


def lower(form: Form, options: argparse.Namespace) -> Any:
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
        trainables, state = OPTIMIZER.update(gradients, state, trainables)
        return trainables, state, loss

    with use(form, options.width):
        trainables = jax.eval_shape(functools.partial(initialize, model, options, form.rounding))
        state = jax.eval_shape(OPTIMIZER.init, trainables)
        return jax.jit(step, donate_argnums=(0, 1)).lower(trainables, state, jax.ShapeDtypeStruct((), np.int32))


def run(compiled: Any, form: Form, options: argparse.Namespace) -> np.ndarray:
    """The losses of all steps."""
    model = make_model(form, options)
    trainables = jax.jit(functools.partial(initialize, model, options, form.rounding))()
    state, losses = OPTIMIZER.init(trainables), []
    for number in range(options.steps):
        trainables, state, loss = compiled(trainables, state, jnp.asarray(number, np.int32))
        losses.append(loss)
    return np.asarray(jnp.stack(losses), np.float64)


def make_model(form: Form, options: argparse.Namespace) -> mlax.Layer:
    model = zoo.GPT2(
        vocabulary=options.vocabulary,
        positions=options.length,
        width=options.width,
        depth=options.depth,
        heads=options.width // 64 or 1,
    )
    return apply_form(model, form)


def initialize(model: mlax.Layer, options: argparse.Namespace, rounding: int) -> Any:
    trainables, _ = model.init(jax.random.key(0), jax.ShapeDtypeStruct((1, options.length), np.int32))
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
    parser.add_argument("--only", nargs="+", default=[], choices=FORMS, metavar="FORM", help="besides the plain form")
    parser.add_argument("--out", help="a file for the curves, JSON")
    main(parser.parse_args())
