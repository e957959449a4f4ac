"""Mixed precision: casts of inputs, trainables and outputs at the boundary of a layer."""

from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp

from mlax.core import (
    DType,
    Layer,
    Wrapper,
    all_layers,
    check_is_dtype,
    check_layer,
    frozen,
    map_layers,
    override,
    with_fields,
)


@frozen
class Mixed(Wrapper):
    """A boundary of mixed precision: compute `layer` in another dtype than its weights are stored in.

    Floating inputs and trainables are cast to `compute`, and floating outputs to `output` (None: not cast).
    Trainables are initialized and stored in `param_dtype`. State is not cast, since running statistics need more
    precision than a narrow dtype has; a layer with state declares its dtype itself. Only a state that stores
    activations, a KeyValueCache, is initialized in `compute`, unless it declares another dtype.
    """

    _: KW_ONLY
    compute: DType = "bfloat16"  # the dtype of the computation
    output: DType = "float32"  # the dtype of results; None: not cast
    param_dtype: DType = "float32"  # the dtype that trainables are stored in

    def init(self, rng, x):
        return map_layers(self.layer, "", self._set_state_dtype).init(rng, cast(x, self.param_dtype))

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y, non_trainables = self.layer.fwd(
            cast(x, self.compute),
            cast(trainables, self.compute),
            non_trainables,
            rng=rng,
            inference_mode=inference_mode,
        )
        return cast(y, self.output), non_trainables

    def _set_state_dtype(self, path: str, layer: Any) -> Layer:
        is_undeclared = layer.stores_activations and layer.param_dtype is None
        return with_fields(layer, param_dtype=self.compute) if is_undeclared else layer


def cast(tree: Any, dtype: DType) -> Any:
    """A pytree with every floating leaf cast to `dtype`; integers, booleans and keys are unchanged. None casts nothing.

    So are float8 leaves, which have no meaning without their scale. Leaves may be arrays or `jax.ShapeDtypeStruct`.
    """
    check_is_dtype("cast", dtype=dtype)
    if dtype is None:
        return tree
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"cast: {dtype} is not a floating dtype, and weights would be rounded to integers; pass a floating dtype."
        )

    def cast_leaf(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize == 1:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype))
        return leaf.astype(dtype)

    return jax.tree.map(cast_leaf, tree)


def mixed_bfloat16(model: Layer) -> Mixed:
    """Mixed precision in bfloat16: the model with float32 weights, bfloat16 computation, float32 statistics and float32
    outputs.

    The default choice for training on GPUs and TPUs; needs no loss scaling.

    >>> model, x = dtypes.mixed_bfloat16(nn.MLP((64, 10))), jnp.ones((8, 16))
    >>> trainables, non_trainables = model.init(jax.random.key(0), x)
    >>> y, non_trainables = model.fwd(x, trainables, non_trainables)
    >>> y.dtype, mlax.get(trainables, "linear_0/kernel").dtype
    (dtype('float32'), dtype('float32'))
    """
    return Mixed(_with_wide_statistics(model), compute="bfloat16")


def mixed_float16(model: Layer) -> Mixed:
    """Mixed precision in float16: the model with float32 weights, float16 computation, float32 statistics and float32
    outputs.

    For GPUs without bfloat16; small gradients underflow in float16, so scale the loss.
    """
    return Mixed(_with_wide_statistics(model), compute="float16")


def _with_wide_statistics(model: Layer) -> Layer:
    """The model with `accum_dtype="float32"` on every layer that takes statistics."""
    check_layer("mixed precision", "model", model)
    kinds = {type(layer) for layer in all_layers(model) if layer.has_statistics}
    return override(model, tuple(kinds), accum_dtype="float32") if kinds else model
