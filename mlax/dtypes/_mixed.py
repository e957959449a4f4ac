"""Mixed precision: the one place where dtypes change."""

from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp

from mlax.core import DType, Layer, Wrapper, check_layer, every, frozen, override


@frozen
class Mixed(Wrapper):
    """Compute `layer` in another dtype than the one its weights are stored in.

    The floating inputs and trainables are cast to `compute` on the way in, and floating outputs to `output` on
    the way out (None: left as they are). Trainables are made and stored in `param_dtype`. State is not cast:
    running statistics would not survive a narrow dtype, so a layer with state says itself what it keeps it in.
    """

    _: KW_ONLY
    compute: DType = "bfloat16"
    output: DType = "float32"
    param_dtype: DType = "float32"

    def init(self, rng, x):
        return self.layer.init(rng, cast(x, self.param_dtype))

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y, non_trainables = self.layer.fwd(
            cast(x, self.compute),
            cast(trainables, self.compute),
            non_trainables,
            rng=rng,
            inference_mode=inference_mode,
        )
        return cast(y, self.output), non_trainables


def cast(tree: Any, dtype: DType) -> Any:
    """The same tree with every floating leaf in `dtype`; integers, booleans and keys stay. None changes nothing.

    Leaves may be arrays or `jax.ShapeDtypeStruct`.
    """
    if dtype is None:
        return tree
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"cast: {dtype} is no floating dtype, and rounding weights to whole numbers is never meant.")

    def converted(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype))
        return leaf.astype(dtype)

    return jax.tree.map(converted, tree)


def mixed_bfloat16(model: Layer) -> Mixed:
    """The model with float32 weights, bfloat16 computation, float32 statistics and float32 outputs.

    The choice for training on today's accelerators; needs no loss scaling.
    """
    return Mixed(_with_statistics_in(model, "float32"), compute="bfloat16")


def mixed_float16(model: Layer) -> Mixed:
    """The model with float32 weights, float16 computation, float32 statistics and float32 outputs.

    For accelerators without bfloat16; small gradients vanish in float16, so scale the loss.
    """
    return Mixed(_with_statistics_in(model, "float32"), compute="float16")


def _with_statistics_in(model: Layer, accum_dtype: DType) -> Layer:
    """The model with `accum_dtype` set on every layer whose statistics a narrow dtype would spoil."""
    check_layer("mixed precision", "model", model)
    kinds = {type(layer) for layer in every(model) if layer.takes_statistics}
    return override(model, tuple(kinds), accum_dtype=accum_dtype) if kinds else model
