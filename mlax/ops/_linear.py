"""The affine map over the last axis."""

from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float

from mlax.ops._checks import same_dtype


def linear(
    x: Float[Array, "... d"],
    kernel: Float[Array, "d f"],
    bias: Float[Array, " f"] | None = None,
    *,
    precision: jax.lax.PrecisionLike = None,
    accum_dtype: Any = None,
) -> Float[Array, "... f"]:
    """`x @ kernel + bias`, in the dtype of `x`; the sum of products runs in `accum_dtype` if one is given."""
    if x.ndim == 0 or x.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"linear: the input has the shape {x.shape} but the kernel {kernel.shape}; "
            "the last axis of the input must be as long as the first of the kernel."
        )
    same_dtype("linear", x=x, kernel=kernel, bias=bias)
    y = lax.dot_general(
        x, kernel, (((x.ndim - 1,), (0,)), ((), ())), precision=precision, preferred_element_type=accum_dtype
    )
    if bias is not None:
        y = y + lax.convert_element_type(bias, y.dtype)
    return lax.convert_element_type(y, x.dtype)
