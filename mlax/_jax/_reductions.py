"""Sums, means and broadcasts that keep the precision of float16 and bfloat16.

On a CPU, XLA rounds a narrow sum to its dtype at every addition: 8,192 ones in bfloat16 add up to 256. A product is
accumulated in float32 and rounded once, on every backend. So on a CPU a narrow sum is the product with ones, which is
also two to eight times as fast. Elsewhere, and in wider dtypes, it is `lax.reduce_sum`.

The gradient of a broadcast is a sum too: `broadcast_like` makes it such a product.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mlax._jax._sharding import explicit_sharding, pcast_like

Axes = tuple[int, ...]

MAX_EXPONENT = 24  # 2**-24 is the least power of two in float16


def is_narrow(dtype: Any) -> bool:
    """Whether the dtype is float16 or bfloat16."""
    return dtype in (jnp.float16, jnp.bfloat16)


def reduce_sum(x: jax.Array, axes: Axes) -> jax.Array:
    """`lax.reduce_sum`, in the dtype of `x`, and rounded to it once."""
    axes = tuple(axis % x.ndim for axis in axes)
    return lax.reduce_sum(x, axes) if sums_precisely(x) else _dot_with(x, axes, 1.0)


def reduce_mean(x: jax.Array, axes: Axes) -> jax.Array:
    """The mean over `axes`, which are dropped, in the dtype of `x`; it does not overflow where the mean does not.

    (`jnp.mean` casts float16 and bfloat16 to float32.)
    """
    axes = tuple(axis % x.ndim for axis in axes)
    count = math.prod(x.shape[axis] for axis in axes)
    if not sums_precisely(x):
        scale = _power_of_two_over(count)
        return divide_by_count(_dot_with(x, axes, scale), count * scale)
    if x.dtype != jnp.float16:
        return divide_by_count(lax.reduce_sum(x, axes), count)
    for axis in sorted(axes, reverse=True):  # one after the other, so that few bits are shifted out of small numbers
        scale = max(_power_of_two_over(x.shape[axis]), 2.0**-15)
        x = divide_by_count(lax.reduce_sum(x * scale, (axis,)), x.shape[axis] * scale)
    return x


def divide_by_count(total: jax.Array, count: Any) -> jax.Array:
    """`total / count`, where the count may be a symbolic dimension."""
    return total / (count if isinstance(count, int | float) else jnp.asarray(count).astype(total.dtype))


def broadcast_like(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`weight`, of as many axes as `x`, to be combined with `x`: its gradient is summed by `reduce_sum`.

    An axis of size 1 broadcasts. Where JAX's own gradient of a broadcast is as precise, `weight` is returned as it is.
    """
    axes = tuple(axis for axis in range(x.ndim) if weight.shape[axis] == 1 and x.shape[axis] != 1)
    if not axes or weight.dtype != x.dtype or sums_precisely(x):
        return weight
    return _outer_with_ones(pcast_like(weight, x), axes, x.shape, explicit_sharding(x))


def expand_last(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`weight` over the last axes of `x`, expanded to as many axes, to be combined with `x` as by `broadcast_like`."""
    return broadcast_like(lax.expand_dims(weight, range(x.ndim - weight.ndim)), x)


def sums_precisely(x: jax.Array) -> bool:
    """Whether XLA's own sums are not rounded to the dtype of `x` at every addition, or the dtype is wide."""
    return not is_narrow(x.dtype) or jax.default_backend() != "cpu"


def _dot_with(x: jax.Array, axes: Axes, number: float) -> jax.Array:
    """The product of `x` with an array of one number over `axes`."""
    sharding = explicit_sharding(x)
    if sharding is not None:
        kept = [entry for axis, entry in enumerate(sharding.spec) if axis not in axes]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*kept))
    filled = lax.full([x.shape[axis] for axis in axes], number, x.dtype)
    dimensions = ((axes, tuple(range(len(axes)))), ((), ()))
    return lax.dot_general(x, filled, dimensions, out_sharding=sharding)


def _power_of_two_over(count: Any) -> float:
    """The largest power of two by which the sum of `count` numbers, each times it, is at most the largest of them."""
    exponent = max(count - 1, 0).bit_length() if isinstance(count, int) else 8  # of a symbolic count, as a compromise
    return 2.0 ** -min(exponent, MAX_EXPONENT)


def _outer_with_ones(weight: jax.Array, axes: Axes, shape: tuple[Any, ...], sharding: Any) -> jax.Array:
    """`weight` broadcast along `axes`, as the outer product with ones, which XLA replaces by a broadcast.

    The transpose is the product that sums. (A custom JVP rule would not do: JAX does not apply it to tangents.)
    """
    order = [*axes, *(axis for axis in range(len(shape)) if axis not in axes)]
    ordered = sharding and NamedSharding(sharding.mesh, PartitionSpec(*(sharding.spec[axis] for axis in order)))
    ones = lax.full([shape[axis] for axis in axes], 1.0, weight.dtype)
    outer = lax.dot_general(ones, lax.squeeze(weight, axes), (((), ()), ((), ())), out_sharding=ordered)
    return lax.transpose(outer, [order.index(axis) for axis in range(len(shape))])
