"""Symmetric quantization to int8 and float8, and products with quantized kernels."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlax._jax import broadcast_like, expand_last
from mlax.core import check_is_dtype
from mlax.ops._checks import check_floating
from mlax.ops._cpu import flatten_rows


def quantize(x: Float[Array, "..."], dtype: Any, axis: int = -1) -> tuple[Array, Array]:
    """Symmetric quantization to int8 or float8: codes in `dtype` and their scale, with `x` close to `codes * scale`.

    One scale for all elements along `axis`, in the dtype of `x`, such that the largest of them is the largest code: 127
    of int8, 448 of float8_e4m3fn. It has at most 8 significant bits, so that a cast to bfloat16 leaves it as it is. The
    error of an element is at most half of the scale in int8 (all of it where `x` is bfloat16, whose own rounding is as
    large), and a sixteenth of the element in float8_e4m3fn. Where `x` has NaN or Inf, the scale is NaN or Inf.
    """
    check_floating("quantize", x)
    check_quantized_dtype("quantize", dtype)
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    scale = _round_to_8_bits(largest / _largest_code(dtype))
    quotient = x / broadcast_like(jnp.where(scale == 0, jnp.ones_like(scale), scale), x)
    codes = jnp.clip(quotient, -_largest_code(dtype), _largest_code(dtype))  # float8_e4m3fn would overflow to NaN
    rounded = jnp.round(codes) if is_integer(dtype) else codes
    return rounded.astype(dtype), jnp.squeeze(scale, axis)


def dequantize(codes: Array, scale: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
    """`codes * scale`, the inverse of `quantize` up to its rounding error, in the dtype of the scale."""
    codes = codes.astype(scale.dtype)
    return codes * broadcast_like(jnp.expand_dims(scale, axis), codes)


def quantized_linear(
    x: Float[Array, "... d"],
    kernel: Array,
    scale: Float[Array, " f"],
    bias: Float[Array, " f"] | None = None,
    *,
    precision: lax.PrecisionLike = None,
    accum_dtype: Any = None,
) -> Float[Array, "... f"]:
    """`x @ (kernel * scale) + bias`, in the dtype of `x`, with a kernel of codes and a scale for each output.

    - An int8 kernel is (d, f). It is converted to the dtype of `x` inside of the product, where XLA fuses it, and its
      sums are multiplied by the scale: the weights are stored as int8, and the product is that of `x.dtype`.
    - A float8 kernel is transposed, (f, d), which is how GPUs multiply float8. `x` is quantized, too, with a scale for
      each row (token), and the product is one of float8 summed in float32 (or `accum_dtype`), which Hopper and newer
      GPUs compute in hardware. Where a device cannot, XLA converts the same codes to a wider dtype first.
    """
    check_is_dtype("quantized_linear", accum_dtype=accum_dtype)
    inputs, outputs = kernel_axes(kernel.dtype)
    rows = flatten_rows(x)
    if is_integer(kernel.dtype):
        shift = 2.0**-7 if x.dtype == jnp.float16 else 1.0  # sums of products with 127 would exceed 65504
        y = _dot(rows, kernel.astype(x.dtype) * shift, inputs, precision, accum_dtype)
        y = y * expand_last(scale.astype(y.dtype) / shift, y)
    else:
        codes, row_scale = quantize(rows, kernel.dtype)
        y = _dot(codes, kernel, inputs, None, accum_dtype or jnp.float32)
        y = y * broadcast_like(row_scale.astype(y.dtype)[..., None], y) * expand_last(scale.astype(y.dtype), y)
    if bias is not None:
        y = y + expand_last(bias.astype(y.dtype), y)
    return y.astype(x.dtype).reshape(*x.shape[:-1], kernel.shape[outputs])


def kernel_axes(dtype: Any) -> tuple[int, int]:
    """The axes of inputs and outputs of a quantized kernel: it is (in, out) in int8 and (out, in) in float8.

    GPUs multiply float8 with the contracted axis last in both operands, so that XLA would transpose a kernel (in, out)
    at every call (benchmarks/quantized.py).
    """
    return (-2, -1) if is_integer(dtype) else (-1, -2)


def is_integer(dtype: Any) -> bool:
    """Whether codes of a quantized dtype are integers, and not float8."""
    return jnp.issubdtype(dtype, jnp.integer)


def is_quantized_dtype(dtype: Any) -> bool:
    """Whether arrays of this dtype are codes that need a scale: int8 and float8."""
    return dtype is not None and jnp.dtype(dtype).name in QUANTIZED


def check_quantized_dtype(owner: str, dtype: Any) -> None:
    """Raise unless arrays can be quantized to `dtype`."""
    check_is_dtype(owner, dtype=dtype)
    if not is_quantized_dtype(dtype):
        raise ValueError(f"{owner}: the dtype is {dtype}, but must be one of {', '.join(QUANTIZED)}.")


QUANTIZED = ("int8", "float8_e4m3fn", "float8_e5m2")


def _largest_code(dtype: Any) -> float:
    # -128 is not used, so that the codes of x and -x are opposite
    return 127.0 if is_integer(dtype) else float(jnp.finfo(dtype).max)


def _round_to_8_bits(scale: jax.Array) -> jax.Array:
    return lax.reduce_precision(scale, exponent_bits=jnp.finfo(scale.dtype).nexp, mantissa_bits=7)


def _dot(x: Array, kernel: Array, axis: int, precision: lax.PrecisionLike, accum_dtype: Any) -> Array:
    dimensions = (((x.ndim - 1,), (axis % kernel.ndim,)), ((), ()))
    return lax.dot_general(x, kernel, dimensions, precision=precision, preferred_element_type=accum_dtype)
