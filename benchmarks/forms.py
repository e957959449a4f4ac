"""The forms in which mlax computes a training step of GPT-2: with each hand-written derivative and kernel, or without.

Not a benchmark, but what `loss_curves.py` and `form_times.py` share: a description of a form, and how to switch it on.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax

import mlax
from mlax import _gpu, dtypes, nn, ops

MODULES = {
    kind: tuple(inspect.getmodule(inspect.unwrap(function)) for function in functions)
    for kind, functions in {
        "norm": (ops.layer_norm,),
        "gelu": (ops.gelu,),
        "loss": (ops.softmax_cross_entropy, ops.linear_cross_entropy),
    }.items()
}
KINDS = tuple(MODULES)
PRODUCTS: Any = inspect.getmodule(_gpu.prefers_product_kernels)
MLP: Any = inspect.getmodule(_gpu.prefers_mlp_kernels)
FUSED: Any = inspect.getmodule(inspect.unwrap(ops.gelu_mlp))


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

    @property
    def needs_kernels(self) -> bool:
        return bool(self.kernels) or self.joins_projections or self.joins_mlp


FORMS = {
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


def apply_form(model: mlax.Layer, form: Form) -> mlax.Layer:
    """The model in mixed precision, with the fields that belong to a form."""
    return dtypes.mixed_bfloat16(override_fields(model, form))


def override_fields(model: mlax.Layer, form: Form) -> mlax.Layer:
    """The model with the fields that belong to a form."""
    model = mlax.override(model, nn.MultiHeadAttention, implementation=form.attention)
    if any(isinstance(layer, nn.CrossEntropyHead) for layer in mlax.layers(model).values()):
        model = mlax.override(model, nn.CrossEntropyHead, chunks=form.chunks)
    return mlax.override(model, mlax.Repeat, mode=form.mode)


@contextlib.contextmanager
def use(form: Form, width: int = 768) -> Iterator[None]:
    """Compute with this form's derivatives and kernels what is traced inside, for a model of this width."""
    with contextlib.ExitStack() as stack:

        def patch(module: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        def never(*args: Any) -> bool:
            return False

        if not form.folds_biases:
            patch(_gpu, "prefers_kernels", never)
        if form.joins_projections:
            patch(PRODUCTS, "MIN_ROWS", PRODUCTS.TILE_M)
            patch(PRODUCTS, "MEASURED_WIDTH", width)
        else:
            patch(_gpu, "prefers_product_kernels", never)
        if form.joins_mlp:
            patch(MLP, "MIN_ROWS", MLP.TILE)
            patch(MLP, "MEASURED_SHAPE", (width, 4 * width))
        else:
            patch(_gpu, "prefers_mlp_kernels", never)
        for kind, modules in MODULES.items():
            for module in modules:
                if kind not in form.derivatives:
                    patch(module, "with_vjp", keep_plain)
                for name in (f"prefers_{kind}_kernel", f"prefers_residual_{kind}_kernel"):
                    if kind not in form.kernels and hasattr(module, name):
                        patch(module, name, never)
        clear_caches()
        yield
    clear_caches()


def keep_plain(plain: Callable[..., Any], *_: Any) -> Callable[..., Any]:
    """In place of `with_vjp`: the function without its hand-written passes."""
    return lambda primals, consts=None: plain(primals, consts)


def clear_caches() -> None:
    for module in {*sum(MODULES.values(), ()), FUSED}:
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    jax.clear_caches()
