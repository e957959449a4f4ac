"""Softmax that stays in one dtype, whole or as its numerator and denominator."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


def softmax(
    x: Float[Array, "..."], visible: Bool[Array, "..."] | None = None, *, axis: int = -1, accum_dtype: Any = None
) -> Float[Array, "..."]:
    """`exp(x) / sum(exp(x))` along `axis`, in the dtype of `x`, or in `accum_dtype` with one cast at the end.

    What is not `visible` counts as minus infinity; where nothing is visible the result is 0, never NaN.
    (`jax.nn.softmax` adds float16 and bfloat16 in float32, unasked.)
    """
    wide = x if accum_dtype is None else lax.convert_element_type(x, jnp.dtype(accum_dtype))
    numerator, denominator, _ = softmax_parts(wide, visible, axis=axis)
    return lax.convert_element_type(numerator / denominator, x.dtype)


def softmax_parts(
    x: Float[Array, "..."],
    visible: Bool[Array, "..."] | None,
    sinks: Float[Array, "..."] | None = None,
    *,
    axis: int = -1,
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """Softmax before its division: (exp(x - m), their sum along `axis`, m), the sum never 0.

    `sinks` broadcasts against the sum and counts as one more entry of x, which takes weight and gives no output.
    """
    axis = axis % x.ndim
    if visible is not None:
        x = jnp.where(visible, x, lowest(x.dtype))
    top = lax.expand_dims(lax.reduce_max(x, (axis,)), (axis,))
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    top = lax.stop_gradient(settled(top))
    numerator = lax.exp(x - top)
    total = lax.expand_dims(lax.reduce_sum(numerator, (axis,)), (axis,))
    if sinks is not None:
        total = total + lax.exp(sinks - top)
    return numerator, nonzero(total), top


def lowest(dtype: Any) -> float:
    """The lowest finite number of a dtype: what stands for minus infinity without making NaN of differences."""
    return float(jnp.finfo(dtype).min)


def settled(top: Float[Array, "..."]) -> Float[Array, "..."]:
    """The largest entries, or 0 where nothing is visible, so that exp(lowest - top) is 0 there and not 1."""
    return jnp.where(top <= lowest(top.dtype), jnp.zeros_like(top), top)


def nonzero(total: Float[Array, "..."]) -> Float[Array, "..."]:
    """The sums, or 1 where nothing is visible, so that the division gives 0."""
    return jnp.where(total == 0, jnp.ones_like(total), total)
