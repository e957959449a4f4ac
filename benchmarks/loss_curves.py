"""Claim: over 300 steps of GPT-2, the loss is that of the plain form within the noise of bfloat16, for each fast form.

Plain is the same model, unrolled, with the gradients that JAX derives, attention by XLA, no kernels of Pallas, and
Optax's loss of float32 logits. Each hand-written derivative and each kernel is switched in alone, then all of them. All
runs have the same initial weights, learn the same text, a random walk over the vocabulary, and compute in bfloat16. The
noise is the difference that another rounding of the initial weights to bfloat16 makes. Compared are means over 20
steps.

    python benchmarks/loss_curves.py                                     # 10 minutes on an H200
    python benchmarks/loss_curves.py --batch 4                           # 3 minutes, half of them to compile
    python benchmarks/loss_curves.py --depth 4 --batch 16 --length 512   # 1 minute
    python benchmarks/loss_curves.py --depth 1 --width 64 --vocabulary 301 --batch 4 --length 32    # on a CPU

It exits with an error if a curve leaves the noise. Typical, by the last command on 2 cores, JAX 0.10.2: the loss falls
from 5.48 to 3.56; the means differ by at most 0.0014 with another rounding, and by 0.0002 with any form. On an H200,
with --batch 4 and JAX 0.11.2: from 10.88 to 9.33; by at most 0.20 with another rounding, and by 0.08 to 0.30 with each
of 12 forms, kernels among them. At first all agree within 0.001; then so few tokens a step make training chaotic. The
kernels of projections and of attention in a scanned stack have no curve of 300 steps yet: with batches of 32 x 1,024
tokens, 33 steps end between 8.24 and 8.39 with each of them and without, as they do if one program runs twice.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import FAILED, print_table, verdict

import mlax
from mlax import dtypes, nn, ops, optim, zoo

MODULES = {
    kind: tuple(inspect.getmodule(inspect.unwrap(function)) for function in functions)
    for kind, functions in {
        "norm": (ops.layer_norm,),
        "gelu": (ops.gelu,),
        "loss": (ops.softmax_cross_entropy, ops.linear_cross_entropy),
    }.items()
}
KINDS = tuple(MODULES)
PRODUCTS: Any = inspect.getmodule(ops.prefers_product_kernels)
MLP: Any = inspect.getmodule(ops.prefers_mlp_kernels)
LINEAR: Any = inspect.getmodule(ops.gelu_mlp)
WINDOW = 20  # steps whose mean is compared
TOLERANCE = 3.0  # times the noise
FLOOR = 0.001  # of the noise, in nats


@dataclass(frozen=True)
class Form:
    """How a training step is computed."""

    derivatives: tuple[str, ...] = ()  # kinds of operations with hand-written ones
    kernels: tuple[str, ...] = ()  # kinds of operations with kernels of Pallas
    has_head: bool = False  # whether output layer and loss are one, by nn.CrossEntropyHead
    chunks: int = 1  # of the head
    attention: str | None = "xla"
    joins_projections: bool = False  # whether the gradients of queries, keys and values are two kernels
    joins_mlp: bool = False  # whether the products of an MLP apply GELU and its gradient
    folds_biases: bool = False  # whether biases are added where a kernel or a product does it anyway
    mode: str = "unroll"  # of Repeat
    is_perturbed: bool = False  # whether the initial weights are rounded differently


PLAIN = "plain"
NOISE = "plain, other rounding"
FORMS = {
    PLAIN: Form(),
    NOISE: Form(is_perturbed=True),
    "derivative of norms": Form(derivatives=("norm",)),
    "kernel of norms": Form(derivatives=("norm",), kernels=("norm",)),
    "derivative of GELU": Form(derivatives=("gelu",)),
    "kernel of GELU": Form(derivatives=("gelu",), kernels=("gelu",)),
    "head with its loss": Form(derivatives=("loss",), has_head=True),
    "head with its loss, in 8 chunks": Form(derivatives=("loss",), has_head=True, chunks=8),
    "kernel of the loss": Form(derivatives=("loss",), kernels=("loss",), has_head=True),
    "fused attention": Form(attention=None),
    "folded biases": Form(folds_biases=True),
    "kernels of projections": Form(joins_projections=True),
    "kernels of MLPs": Form(joins_mlp=True),
    "scanned": Form(mode="scan"),
    "scanned, fused attention": Form(mode="scan", attention=None),  # whose forward pass is a kernel then
    "all": Form(KINDS, KINDS, has_head=True, attention=None, joins_projections=True, joins_mlp=True, folds_biases=True),
}
FORMS["all, scanned"] = replace(FORMS["all"], mode="scan")


def main(options: argparse.Namespace) -> None:
    has_kernels = ops.kernel_backend(jax.ShapeDtypeStruct((4096, 768), jnp.bfloat16), accum_dtype="float32")
    is_present = has_kernels.startswith("mosaic")
    chosen = {name: form for name, form in FORMS.items() if not options.only or name in (PLAIN, NOISE, *options.only)}
    needing = {name for name, form in chosen.items() if form.kernels or form.joins_projections or form.joins_mlp}
    # elsewhere all but the kernels
    forms = {name: form for name, form in chosen.items() if is_present or name.startswith("all") or name not in needing}
    lowered = {name: lower(form, options) for name, form in forms.items()}  # one at a time: they patch modules
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = dict(zip(lowered, pool.map(lambda each: each.compile(), lowered.values()), strict=True))
    curves = {name: run(compiled[name], forms[name], options) for name in forms}
    if options.out:
        with open(options.out, "w") as file:
            json.dump({name: curve.tolist() for name, curve in curves.items()}, file)
    means = {name: curve.reshape(-1, WINDOW).mean(1) for name, curve in curves.items()}
    noise = max(FLOOR, np.abs(means[NOISE] - means[PLAIN]).max())
    rows = []
    for name, mean in means.items():
        gap = np.abs(mean - means[PLAIN]).max()
        claim = "" if name in (PLAIN, NOISE) else verdict(f"within {TOLERANCE:g} x noise", gap <= TOLERANCE * noise)
        rows.append((name, f"{mean[0]:.4f}", f"{mean[-1]:.4f}", f"{gap:.4f}", claim))
    title = f"Loss over {options.steps} steps of GPT-2, {options.depth} x {options.width}, on {jax.devices()[0]}"
    print_table(title, ("form", "first 20", "last 20", "largest gap", ""), rows)
    sys.exit(bool(FAILED))


@contextlib.contextmanager
def use(form: Form) -> Iterator[None]:
    """Compute with this form's derivatives and kernels what is traced inside."""
    with contextlib.ExitStack() as stack:
        if not form.folds_biases:
            stack.enter_context(mock.patch.object(ops, "prefers_kernels", return_value=False))
        if form.joins_projections:
            stack.enter_context(mock.patch.object(PRODUCTS, "MIN_ROWS", PRODUCTS.TILE_M))
        else:
            stack.enter_context(mock.patch.object(ops, "prefers_product_kernels", return_value=False))
        if form.joins_mlp:
            stack.enter_context(mock.patch.object(MLP, "MIN_ROWS", MLP.TILE))
        else:
            stack.enter_context(mock.patch.object(LINEAR, "prefers_mlp_kernels", return_value=False))
        for kind, modules in MODULES.items():
            for module in modules:
                if kind not in form.derivatives:
                    stack.enter_context(mock.patch.object(module, "with_vjp", keep_plain))
                for name in (f"prefers_{kind}_kernel", f"prefers_residual_{kind}_kernel"):
                    if kind not in form.kernels and hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, return_value=False))
                clear_caches(module)
        jax.clear_caches()
        yield
    for module in sum(MODULES.values(), ()):
        clear_caches(module)


def keep_plain(plain: Callable[..., Any], *_: Any) -> Callable[..., Any]:
    """In place of `with_vjp`: the function without its hand-written passes."""
    return lambda primals, consts=None: plain(primals, consts)


def clear_caches(module: Any) -> None:
    for value in vars(module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def lower(form: Form, options: argparse.Namespace) -> Any:
    """The training step: (trainables, state, number of the step) to these and the loss."""
    model = make_model(form, options)
    optimizer = optim.AdamW(3e-4)

    def step(trainables: Any, state: Any, number: jax.Array) -> Any:
        text = draw_text(number, options)

        def mean_loss(trainables: Any) -> jax.Array:
            if form.has_head:
                return model.fwd((text[:, :-1], None, text[:, 1:]), trainables)[0].mean()
            logits, _ = model.fwd(text[:, :-1], trainables)
            return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(mean_loss)(trainables)
        trainables, state = optimizer.update(gradients, state, trainables)
        return trainables, state, loss

    with use(form):
        trainables = jax.eval_shape(functools.partial(initialize, model, options, form.is_perturbed))
        state = jax.eval_shape(optimizer.init, trainables)
        return jax.jit(step, donate_argnums=(0, 1)).lower(trainables, state, jax.ShapeDtypeStruct((), np.int32))


def run(compiled: Any, form: Form, options: argparse.Namespace) -> np.ndarray:
    """The losses of all steps."""
    model = make_model(form, options)
    trainables = jax.jit(functools.partial(initialize, model, options, form.is_perturbed))()
    state, losses = optim.AdamW(3e-4).init(trainables), []
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
    model = mlax.override(model, nn.MultiHeadAttention, implementation=form.attention)
    model = mlax.override(model, nn.CrossEntropyHead, chunks=form.chunks)
    return dtypes.mixed_bfloat16(mlax.override(model, mlax.Repeat, mode=form.mode))


def initialize(model: mlax.Layer, options: argparse.Namespace, is_perturbed: bool) -> Any:
    trainables, _ = model.init(jax.random.key(0), jax.ShapeDtypeStruct((1, options.length), np.int32))
    if not is_perturbed:
        return trainables
    return jax.tree.map(lambda leaf: leaf * (1 + 2.0**-10), trainables)  # a quarter of the spacing in bfloat16


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
    for name, default in {"steps": 300, "depth": 12, "width": 768, "vocabulary": 50_257, "batch": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--only", nargs="+", default=[], choices=FORMS, metavar="FORM", help="besides the plain form")
    parser.add_argument("--out", help="a file for the curves, JSON")
    main(parser.parse_args())
