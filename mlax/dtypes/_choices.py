"""Ready-made choices of dtypes for whole models."""

from mlax.core import DType, Layer, check_layer, every, override
from mlax.dtypes._mixed import Mixed


def mixed_bfloat16(model: Layer) -> Mixed:
    """The model with float32 weights, bfloat16 computation, float32 statistics and float32 outputs.

    The choice for training on today's accelerators; needs no loss scaling.
    """
    return Mixed(_wide_statistics(model, "float32"), compute="bfloat16")


def mixed_float16(model: Layer) -> Mixed:
    """The model with float32 weights, float16 computation, float32 statistics and float32 outputs.

    For accelerators without bfloat16; small gradients vanish in float16, so scale the loss.
    """
    return Mixed(_wide_statistics(model, "float32"), compute="float16")


def _wide_statistics(model: Layer, accum_dtype: DType) -> Layer:
    """The model with `accum_dtype` set on every layer whose statistics a narrow dtype would spoil."""
    check_layer("mixed precision", "model", model)
    kinds = {type(layer) for layer in every(model) if layer.takes_statistics}
    return override(model, tuple(kinds), accum_dtype=accum_dtype) if kinds else model
