"""Quantized inference: Linear layers whose kernels are int8 or float8, with a scale for each output."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mlax import ops
from mlax.core import (
    DType,
    Layer,
    Tied,
    Tree,
    Wrapper,
    as_patterns,
    check_layer,
    check_not_donated,
    find_layers,
    flatten_paths,
    frozen,
    map_layers,
    match_paths,
    short_repr,
    unflatten_paths,
)
from mlax.dtypes import cast
from mlax.nn._linear import Linear
from mlax.nn._lora import LoRA


@frozen
class QuantizedLinear(Wrapper):
    """A Linear with a quantized kernel, for inference: `x @ (kernel * scale) + bias`; `nn.quantize` makes them.

    Inputs and outputs as of the Linear. Trainables: kernel in `dtype`, scale (features,), and the Linear's bias; int8
    has no gradient, so the kernel cannot be trained.
    - "int8" quantizes the weights alone, in half the memory of bfloat16: the kernel (d, features) is converted to the
      dtype of the input inside of the product.
    - "float8_e4m3fn" quantizes the input, too, with a scale for each token, and multiplies in float8, summed in
      float32: for GPUs with fp8 matrix products (Ada, Hopper and newer). Their kernel is transposed, (features, d), as
      such GPUs read it. Other devices compute the same in a wider dtype.

    >>> layer, x = nn.QuantizedLinear(nn.Linear(32), "int8"), jnp.ones((8, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> trainables["kernel"].dtype, layer.fwd(x, trainables, non_trainables)[0].shape
    (dtype('int8'), (8, 32))
    """

    layer: Linear  # the Linear to quantize
    dtype: DType  # of the kernel: "int8" or "float8_e4m3fn"

    def __post_init__(self):
        if not isinstance(self.layer, Linear):
            raise TypeError(
                f"QuantizedLinear: {short_repr(self.layer)} is not a Linear; model, trainables = nn.quantize(model, "
                "trainables) quantizes every Linear of a model."
            )
        ops.check_quantized_dtype("QuantizedLinear", self.dtype)

    @property
    def param_dtype(self) -> Any:
        """The Linear's, of the scale and the bias."""
        return self.layer.param_dtype

    def init(self, rng, x):
        trainables, _ = self.layer.init(rng, x)
        return _quantize_leaves(trainables, self.dtype), None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        weights = {name: leaf if name == "kernel" else cast(leaf, x.dtype) for name, leaf in trainables.items()}
        numerics = {"precision": self.layer.precision, "accum_dtype": self.layer.accum_dtype}
        y = ops.quantized_linear(x, **weights, **numerics)
        return y if self.layer.activation is None else self.layer.activation(y), non_trainables

    def tensor_parallel_axes(self, number):
        _, outputs = ops.kernel_axes(self.dtype)
        return {"kernel": outputs, "scale": -1, "bias": -1}

    def check_variables(self, x: Any, trainables: Tree, non_trainables: Tree) -> None:
        if isinstance(trainables, dict) and "kernel" in trainables and trainables["kernel"].dtype != self.dtype:
            raise TypeError(
                f"{short_repr(self)}: the kernel is {trainables['kernel'].dtype}, but must be {self.dtype}; quantize "
                f'the weights together with the model: nn.quantize(model, trainables, "{self.dtype}").'
            )
        check_not_donated(type(self).__name__, trainables=trainables)
        codes = {name: _as_codes(leaf) if name == "kernel" else leaf for name, leaf in (trainables or {}).items()}
        Layer.check_variables(self, x, codes, non_trainables)


def quantize(
    model: Layer, trainables: Tree, dtype: DType = "int8", patterns: str | tuple[str, ...] = "**"
) -> tuple[Any, Tree]:
    """Post-training quantization: the model with a QuantizedLinear for each Linear, and its trainables.

        model, trainables = nn.quantize(model, trainables, "int8")
        model, trainables = nn.quantize(model, trainables, "float8_e4m3fn", ("**", "!head"))

    `patterns` select Linears by path: in attention, MLP, GLU, Repeat, the experts of MoE. Embeddings, convolutions and
    norms stay, and so does a kernel that is tied to another leaf or reparameterized, as by WeightNorm. A LoRA must be
    merged first. Kernels in int8 keep their shapes; those in float8 are transposed, (features, d). The error of each
    weight is at most half a 127th of the largest weight of its output in int8, and a sixteenth of itself in
    float8_e4m3fn.

    >>> model, x = nn.MLP((64, 10)), jnp.ones((8, 16))
    >>> model, trainables = nn.quantize(model, model.init(jax.random.key(0), x)[0])
    >>> mlax.get(trainables, "linear_0/kernel").dtype, model.fwd(x, trainables)[0].shape
    (dtype('int8'), (8, 10))
    """
    check_layer("quantize", "the model", model)
    check_not_donated("quantize", trainables=trainables)
    ops.check_quantized_dtype("quantize", dtype)
    if loras := find_layers(model, LoRA):
        raise ValueError(
            f"quantize: {loras[0][0] or 'the model'} has a LoRA; merge it first: nn.merge_lora(model, trainables), and "
            "quantize the model without it."
        )
    leaves = flatten_paths(trainables)
    tied = {_join(path, tie.to) for path, each in find_layers(model, Tied) for tie in each.ties}
    own = leaves.keys() - tied
    found = [path for path, layer in find_layers(model, Linear) if _has_kernel(path, layer, own)]
    chosen = set(match_paths(as_patterns(patterns), found)) if found else set()
    if not found and find_layers(model, QuantizedLinear):
        raise ValueError(f"quantize: {short_repr(model)} is quantized already; pass the model and weights from before.")
    if not chosen:
        raise ValueError(f"quantize: there is no Linear with a kernel in {short_repr(model)}; nothing was quantized.")
    for path in chosen:
        names = {name: _join(path, name) for name in ("kernel", "bias") if _join(path, name) in leaves}
        new = _quantize_leaves({name: leaves[where] for name, where in names.items()}, dtype)
        leaves |= {_join(path, name): leaf for name, leaf in new.items()}

    def wrap_linear(path: str, layer: Layer) -> Layer:
        return QuantizedLinear(layer, dtype) if isinstance(layer, Linear) and path in chosen else layer

    return map_layers(model, "", wrap_linear), unflatten_paths(leaves.items())


@functools.partial(jax.jit, static_argnames="dtype")
def _quantize_leaves(trainables: Any, dtype: Any) -> Tree:
    """The variables of a Linear with codes and a scale for its kernel, or for a stack of kernels (n, d, f)."""
    inputs, outputs = ops.kernel_axes(dtype)
    kernel = jnp.moveaxis(trainables["kernel"], (-2, -1), (inputs, outputs))
    kernel, scale = ops.quantize(kernel, dtype, axis=inputs)
    return {**trainables, "kernel": kernel, "scale": scale}


def _has_kernel(path: str, layer: Linear, leaves: Any) -> bool:
    """Whether the variables at a path are those of the Linear alone, all of them stored there."""
    names = {_join(path, "kernel"), *([_join(path, "bias")] if layer.bias else [])}
    below = {name for name in leaves if name.rpartition("/")[0] == path}
    return names == below


def _as_codes(kernel: Any) -> Any:
    """Its shape in a dtype that is not floating, since the codes need not have the dtype of the input."""
    return jax.ShapeDtypeStruct(kernel.shape, jnp.int8)


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
