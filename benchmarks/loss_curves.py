"""Claim: over 300 steps of GPT-2, each fast form computes the loss of the plain form within the noise of bfloat16.

Plain is the same model, unrolled, with the gradients that JAX derives, attention by XLA, no kernels of Pallas, and
Optax's loss of float32 logits. Each hand-written derivative and each kernel is switched in alone, then all of them. All
learn the same text, a random walk over the vocabulary, compute in bfloat16, and warm the learning rate up.

Rounding to bfloat16 has a bias and a variance. The bias is how far the plain form is from the same model in float32.
There are two plain forms, since inside of a fusion XLA skips the rounding of intermediate results
(`xla_allow_excess_precision`), so that other fusions, or kernels, round others: in the second, every result is rounded.
The variance is measured from several roundings of the same initial weights. Compared are means over 20 steps and over
these roundings. A form may be as far from float32 as a plain form is, plus four standard errors, or 0.001 nats. A
control, in which one in 24 tiles of the gradients of the first product of each MLP is zero, has to be farther.

Gradients are compared, too, since the curves of equal programs diverge: at the weights after the float32 run, relative
to its gradients. The error of a form may be 1.1 times that of a plain form.

    python -m benchmarks.loss_curves --batch 4 --out runs/curves.json    # about 8 minutes on an H200; resumes
    python -m benchmarks.loss_curves --batch 4 --only "kernels of MLPs" "kernels of projections"
    python -m benchmarks.loss_curves --depth 1 --width 64 --vocabulary 301 --batch 4 --length 32    # on a CPU

It exits with 1 if a form is farther from float32 than that, or if the control is not. What a GPU gave is in
docs/design/gpu-kernels.md.
"""

import argparse
import concurrent.futures
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mlax
from benchmarks.forms import FORMS, Form, apply_form, override_fields, use
from benchmarks.harness import FAILED, print_table, verdict
from mlax import ops, optim, zoo

FLOAT32, PLAIN, ROUNDED = "float32", "plain", "plain, all rounded"
CONTROL, ALL = "control, tiles lost", "all leaves"
OPTIONS = {  # of XLA
    FLOAT32: {"xla_gpu_enable_triton_gemm": False},  # whose autotuning in full precision takes minutes
    ROUNDED: {"xla_allow_excess_precision": False},
}
SIZES = {"steps": 300, "depth": 12, "width": 768, "vocabulary": 50_257, "batch": 32, "length": 1024}
WINDOW = 20  # steps whose mean is compared
BOUND = 4.0  # standard errors: 15 forms in 15 windows are 225 comparisons
FLOOR = 0.001  # of the bound, in nats
GRADIENT_BOUND = 1.1  # of the error of the plain forms' gradients
# the rate is warmed up: at the full one from the start, curves of equal programs part after 20 steps of small batches
OPTIMIZER = optim.AdamW(optim.WarmupCosine(3e-4, warmup=100, total=10_000))


def main(options: argparse.Namespace) -> None:
    results = Results(options.out, {name: getattr(options, name) for name in SIZES})
    forms = {FLOAT32: Form(), PLAIN: Form(), ROUNDED: Form(), CONTROL: Form(), **choose_forms(options)}
    lowered = {name: lower(name, form, options) for name, form in forms.items()}  # one at a time: they patch modules
    with concurrent.futures.ThreadPoolExecutor() as pool:
        started = {
            name: pool.submit(each.compile, compiler_options=OPTIONS.get(name)) for name, each in lowered.items()
        }
    steps = {name: each.result() for name, each in started.items()}
    for rounding in range(options.roundings):
        weights = initialize(options, rounding)
        for name, step in steps.items():
            if len(results.curves.get(name, [])) <= rounding:
                results.curves.setdefault(name, []).append(train(step, weights, options)[0])
                results.write()
    if not forms.keys() <= results.gradient_errors.keys():
        _, weights = train(steps[FLOAT32], initialize(options, 0), options)
        exact = first_gradients(steps[FLOAT32], weights, options)
        for name, step in steps.items():
            results.gradient_errors[name] = relative_errors(first_gradients(step, weights, options), exact)
        results.write()
    title = f"Loss over {options.steps} steps of GPT-2, {options.depth} x {options.width}, on {jax.devices()[0]}"
    header = ("form", "last 20", "from float32", "farther by", "s. e.", "gradient", "")
    curves = {name: results.curves[name][: options.roundings] for name in forms}
    print_table(title, header, compare(curves, {name: results.gradient_errors[name][ALL] for name in forms}))
    sys.exit(bool(FAILED))


class Results:
    """The curves and the errors of gradients that have been measured, in a file if there is one."""

    def __init__(self, path: str | None, sizes: dict[str, int]):
        self.path, self.sizes = Path(path) if path else None, sizes
        found = json.loads(self.path.read_text()) if self.path and self.path.exists() else {"sizes": sizes}
        if found.get("sizes") != sizes:
            raise SystemExit(f"--out: {path} has curves of {found.get('sizes')}, not of {sizes}; choose another file.")
        self.curves: dict[str, list[list[float]]] = found.get("curves", {})  # of each form, from each rounding
        self.gradient_errors: dict[str, dict[str, float]] = found.get("gradient_errors", {})  # of each form, by leaf

    def write(self) -> None:
        if self.path:
            found = {"sizes": self.sizes, "curves": self.curves, "gradient_errors": self.gradient_errors}
            self.path.write_text(json.dumps(found))


def compare(curves: dict[str, list[list[float]]], gradient_errors: dict[str, float]) -> list[tuple[str, ...]]:
    """A row of the table for each form, from the losses from each rounding, as many for each form."""
    windows = {name: np.reshape(each, (len(each), -1, WINDOW)).mean(2) for name, each in curves.items()}
    means = {name: each.mean(0) - windows[FLOAT32].mean(0) for name, each in windows.items()}  # distances from float32
    scattered = np.stack([each for name, each in windows.items() if name != FLOAT32])  # (form, rounding, window)
    forms, roundings, _ = scattered.shape
    shared = scattered.mean(1, keepdims=True) + scattered.mean(0) - scattered.mean((0, 1))  # of a form, of a rounding
    variance = ((scattered - shared) ** 2).sum((0, 1)) / ((forms - 1) * (roundings - 1)) / roundings  # of a mean
    plain = np.where(abs(means[PLAIN]) > abs(means[ROUNDED]), means[PLAIN], means[ROUNDED])
    gradient_bound = GRADIENT_BOUND * max(gradient_errors[PLAIN], gradient_errors[ROUNDED])
    rows = []
    for name, mean in means.items():
        # beyond float32, the bound is the plain form reflected in it: 2 * float32 - plain, whose variance is 5
        error = np.sqrt(variance * np.where(mean * plain >= 0, 2, 6))
        gaps = np.maximum(abs(mean) - abs(plain), 0)
        ratio = (gaps / np.maximum(error, FLOOR / BOUND)).max()
        holds, claim = ratio <= BOUND and gradient_errors[name] <= gradient_bound, ""
        if name == PLAIN:
            bound = np.maximum(BOUND * np.sqrt(2 * variance), FLOOR)
            claim = f"{BOUND:g} s. e.: {bound[0]:.4f} to {bound.max():.4f}"
        elif name == CONTROL:
            claim = verdict("outside the noise", not holds)
        elif name not in (FLOAT32, ROUNDED):
            claim = verdict("within the noise", holds)
        farthest = mean[abs(mean).argmax()]
        rows.append(
            (
                name,
                f"{windows[name].mean(0)[-1]:.4f}",
                f"{farthest:+.4f}",
                f"{gaps.max():.4f}",
                f"{ratio:.1f}",
                f"{gradient_errors[name]:.2%}",
                claim,
            )
        )
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
    model = (override_fields if name == FLOAT32 else apply_form)(make_model(options), form)

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

    exact = jax.default_matmul_precision("highest") if name == FLOAT32 else contextlib.nullcontext()
    with use(form, options.width), exact:
        trainables = jax.eval_shape(lambda: initialize(options, 0))
        state = jax.eval_shape(OPTIMIZER.init, trainables)
        return jax.jit(step, donate_argnums=(0, 1)).lower(trainables, state, jax.ShapeDtypeStruct((), np.int32))


def train(step: Any, trainables: Any, options: argparse.Namespace) -> tuple[list[float], Any]:
    """The losses of all steps, and the trainables after them."""
    trainables = jax.tree.map(jnp.copy, trainables)  # which are donated
    state, losses = OPTIMIZER.init(trainables), []
    for number in range(options.steps):
        trainables, state, loss = step(trainables, state, jnp.asarray(number, np.int32))
        losses.append(loss)
    return np.asarray(jnp.stack(losses)).tolist(), trainables


def first_gradients(step: Any, trainables: Any, options: argparse.Namespace) -> dict[str, np.ndarray]:
    """The gradients of one step, scaled: after the first one, AdamW's mean is `1 - b1` times them."""
    trainables = jax.tree.map(jnp.copy, trainables)
    _, state, _ = step(trainables, OPTIMIZER.init(trainables), jnp.asarray(options.steps, np.int32))
    leaves = jax.tree.leaves_with_path(state.mean)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def relative_errors(gradients: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> dict[str, float]:
    """The norm of the error over that of the exact gradient, for each leaf and for all of them."""
    squares = {
        name: (np.square(gradients[name] - leaf, dtype=float).sum(), np.square(leaf, dtype=float).sum())
        for name, leaf in exact.items()
    }
    squares[ALL] = tuple(map(sum, zip(*squares.values(), strict=True)))
    return {name: float(np.sqrt(error / whole)) for name, (error, whole) in squares.items()}


def lose_tile(path: Any, gradient: jax.Array) -> jax.Array:
    """The gradient as a kernel would leave it that forgets the first of 24 tiles of columns of an MLP."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    lost = gradient.shape[-1] // 24 if name.endswith("up/kernel") else 0
    return gradient.at[..., :lost].set(0) if lost else gradient


def make_model(options: argparse.Namespace) -> mlax.Layer:
    return zoo.GPT2(
        vocabulary=options.vocabulary,
        positions=options.length,
        width=options.width,
        depth=options.depth,
        heads=options.width // 64 or 1,
    )


def initialize(options: argparse.Namespace, rounding: int) -> Any:
    """Weights, the same for all forms; other than 0, `rounding` seeds factors that round them to other bfloat16."""
    example = jax.ShapeDtypeStruct((1, options.length), np.int32)
    trainables, _ = make_model(options).init(jax.random.key(0), example)
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
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--roundings", type=int, default=4, help="of the initial weights, for each form")
    parser.add_argument("--only", nargs="+", default=[], choices=FORMS, metavar="FORM", help="besides the plain form")
    parser.add_argument("--out", help="a file for the curves, JSON; those that it has are not computed again")
    options = parser.parse_args()
    if options.roundings < 2 or options.steps % WINDOW:
        parser.error(f"the scatter is that of two roundings or more, and the steps are windows of {WINDOW}.")
    main(options)
