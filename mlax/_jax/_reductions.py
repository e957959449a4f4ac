"""Sums, means and broadcasts that keep the precision of float16 and bfloat16.

On a CPU, XLA rounds a narrow sum to its dtype at every addition: 8,192 ones in bfloat16 add up to 256. A product is
accumulated in float32 and rounded once. So on a CPU a narrow sum is the product with ones, in blocks that float32 adds
up without a loss, which is also two to eight times as fast. Elsewhere, and in wider dtypes, it is `lax.reduce_sum`.

The gradient of a broadcast is a sum too: `broadcast_like` makes it such a product.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mlax._jax._name_stack import WORKAROUND
from mlax._jax._sharding import explicit_sharding, pcast_like

Axes = tuple[int, ...]

BLOCK = 2**12  # elements that are added up in float32 before they are rounded


def is_narrow(dtype: Any) -> bool:
    """Whether the dtype is float16 or bfloat16."""
    return dtype in (jnp.float16, jnp.bfloat16)


def reduce_sum(x: jax.Array, axes: Axes) -> jax.Array:
    """`lax.reduce_sum`, in the dtype of `x`, and rounded to it once for each block."""
    axes = tuple(axis % x.ndim for axis in axes)
    return lax.reduce_sum(x, axes) if sums_precisely(x) else _sum_by_products(x, axes)


def reduce_sum_by_product(x: jax.Array, axes: Axes) -> jax.Array:
    """`reduce_sum`, on a CPU as a product with ones in every dtype.

    That is faster where `x` is computed from other arrays and read again: XLA writes the operands of a product once,
    but for a sum also what they are broadcast from (benchmarks/layers.py, LayerNorm).
    """
    axes = tuple(axis % x.ndim for axis in axes)
    return _sum_by_products(x, axes) if jax.default_backend() == "cpu" else lax.reduce_sum(x, axes)


def mean_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The mean of `x * weight` over the last axes, which `weight` has, and which remain as axes of size 1.

    On a CPU it is a matrix product, for which XLA does not broadcast `weight` in memory.
    """
    axes = tuple(range(x.ndim - weight.ndim, x.ndim))
    if jax.default_backend() != "cpu" or explicit_sharding(x) is not None or x.dtype == jnp.float16:
        return lax.expand_dims(reduce_mean(x * expand_last(weight, x), axes), axes)
    with jax.named_scope(WORKAROUND):
        total = lax.dot_general(x, weight, ((axes, tuple(range(weight.ndim))), ((), ())))
    return lax.expand_dims(divide_by_count(total, math.prod(weight.shape)), axes)


def reduce_mean(x: jax.Array, axes: Axes) -> jax.Array:
    """The mean over `axes`, which are dropped, in the dtype of `x`; it does not overflow where the mean does not.

    (`jnp.mean` casts float16 and bfloat16 to float32.)
    """
    axes = tuple(axis % x.ndim for axis in axes)
    count = math.prod(x.shape[axis] for axis in axes)
    if x.dtype != jnp.float16:
        return divide_by_count(reduce_sum(x, axes), count)
    is_precise = sums_precisely(x)
    if not is_precise:
        x, axes = _split_long_axes(x, axes)
    for block in [(axis,) for axis in axes] if is_precise else _group_axes(x.shape, axes):
        scale = _power_of_two_over(math.prod(x.shape[axis] for axis in block))
        x = lax.expand_dims(lax.reduce_sum(x * scale, block), block) if is_precise else _dot_with(x, block, scale)
        count = count * scale
    return divide_by_count(lax.squeeze(x, axes), count)


def euclidean_norm(x: jax.Array, axes: Axes) -> jax.Array:
    """The Euclidean norm over `axes`, which remain as axes of size 1; squares neither overflow nor underflow."""
    axes = tuple(axis % x.ndim for axis in axes)
    largest = lax.stop_gradient(lax.expand_dims(lax.reduce_max(lax.abs(x), axes), axes))
    largest = jnp.where(largest > 0, largest, jnp.ones_like(largest))
    scaled = x / largest
    return largest * lax.sqrt(lax.expand_dims(reduce_sum(scaled * scaled, axes), axes))


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
    return _broadcast(pcast_like(weight, x), axes, x.shape, explicit_sharding(x))


def expand_last(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`weight` over the last axes of `x`, expanded to as many axes, to be combined with `x` as by `broadcast_like`."""
    return broadcast_like(lax.expand_dims(weight, range(x.ndim - weight.ndim)), x)


def divide(x: jax.Array, total: jax.Array) -> jax.Array:
    """`x / total`, whose axes of size 1 broadcast as by `broadcast_like`; its derivative does not overflow in float16.

    JAX's own divides by the square of `total`, which ends at 65504.
    """
    return _divide(x, total) if x.dtype == jnp.float16 else x / broadcast_like(total, x)


@jax.custom_jvp
def _divide(x: jax.Array, total: jax.Array) -> jax.Array:
    return x / total


@_divide.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x, total), (x_dot, total_dot) = primals, tangents
    y = _divide(x, total)
    return y, _divide(x_dot - y * broadcast_like(total_dot, x), total)


def sums_precisely(x: jax.Array) -> bool:
    """Whether XLA's own sums are not rounded to the dtype of `x` at every addition, or the dtype is wide."""
    return not is_narrow(x.dtype) or jax.default_backend() != "cpu"


def _sum_by_products(x: jax.Array, axes: Axes) -> jax.Array:
    x, axes = _split_long_axes(x, axes)
    for block in _group_axes(x.shape, axes):
        x = _dot_with(x, block, 1.0)
    return lax.squeeze(x, axes)


def _dot_with(x: jax.Array, axes: Axes, number: float) -> jax.Array:
    """The product of `x` with an array of one number over `axes`, which remain as axes of size 1."""
    sharding = explicit_sharding(x)
    if sharding is not None:
        kept = [entry for axis, entry in enumerate(sharding.spec) if axis not in axes]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*kept))
    filled, each = lax.full([x.shape[axis] for axis in axes], number, x.dtype), tuple(range(len(axes)))
    left, right = (filled, x) if axes == each else (x, filled)  # XLA would transpose an `x` on the left in memory
    dimensions = (each, axes) if axes == each else (axes, each)
    with jax.named_scope(WORKAROUND):
        total = lax.dot_general(left, right, (dimensions, ((), ())), out_sharding=sharding)
    return lax.expand_dims(total, axes)


def _broadcast(weight: jax.Array, axes: Axes, shape: Sequence[Any], sharding: NamedSharding | None) -> jax.Array:
    """`weight` broadcast along `axes`, as outer products with ones: the transpose of the products that sum.

    XLA replaces them by broadcasts. (A custom JVP rule would not do: JAX does not apply it to tangents.)
    """
    sizes, long = _split_sizes(shape, axes, sharding is not None)
    split = [size for each in sizes for size in each]
    axes = _axes_after_split(sizes, axes)
    weight = lax.reshape(weight, [1 if axis in axes else size for axis, size in enumerate(split)]) if long else weight
    for block in reversed(_group_axes(split, axes)):
        weight = _outer_with_ones(weight, block, [split[axis] for axis in block], sharding)
    if not long:
        return weight
    padded = lax.reshape(weight, [math.prod(each) for each in sizes])
    return lax.slice(padded, [0] * len(shape), shape)


def _outer_with_ones(weight: jax.Array, axes: Axes, sizes: list[Any], sharding: NamedSharding | None) -> jax.Array:
    """`weight` with its `axes`, of size 1, broadcast to `sizes`."""
    order = [*axes, *(axis for axis in range(weight.ndim) if axis not in axes)]
    if sharding is not None:
        now = jax.typeof(weight).sharding.spec
        spec = PartitionSpec(*((sharding.spec if axis in axes else now)[axis] for axis in order))
        sharding = NamedSharding(sharding.mesh, spec)
    ones = lax.full(sizes, 1.0, weight.dtype)
    with jax.named_scope(WORKAROUND):
        outer = lax.dot_general(ones, lax.squeeze(weight, axes), (((), ()), ((), ())), out_sharding=sharding)
    return lax.transpose(outer, [order.index(axis) for axis in range(weight.ndim)])


def _split_long_axes(x: jax.Array, axes: Axes) -> tuple[jax.Array, Axes]:
    """`x`, padded with zeros, with each long one of `axes` split into blocks, and all `axes` in the result."""
    sizes, long = _split_sizes(x.shape, axes, explicit_sharding(x) is not None)
    if not long:
        return x, axes
    widths = [(0, math.prod(each) - size, 0) for each, size in zip(sizes, x.shape, strict=True)]
    padded = lax.pad(x, jnp.zeros((), x.dtype), widths)
    return lax.reshape(padded, [size for each in sizes for size in each]), _axes_after_split(sizes, axes)


def _split_sizes(shape: Sequence[Any], axes: Axes, is_sharded: bool) -> tuple[list[tuple[Any, ...]], bool]:
    """The sizes that each axis is split into, of which the last is a block, and whether one is split at all.

    Sharded axes stay whole, since JAX would have to gather them.
    """
    split: list[tuple[Any, ...]] = []
    for axis, size in enumerate(shape):
        is_long = axis in axes and not is_sharded and isinstance(size, int) and size > BLOCK
        split.append((-(-size // BLOCK), BLOCK) if is_long else (size,))
    return split, any(len(each) > 1 for each in split)


def _axes_after_split(sizes: list[tuple[Any, ...]], axes: Axes) -> Axes:
    starts = [sum(map(len, sizes[:axis])) for axis in range(len(sizes))]
    return tuple(starts[axis] + part for axis in axes for part in range(len(sizes[axis])))


def _group_axes(shape: Sequence[Any], axes: Axes) -> list[Axes]:
    """The axes in groups that have at most a block of elements together, or are one axis."""
    groups: list[Axes] = []
    for axis in axes:
        more = (*groups[-1], axis) if groups else (axis,)
        sizes = [shape[each] for each in more]
        fits = all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= BLOCK
        groups = [*groups[:-1], more] if groups and fits else [*groups, (axis,)]
    return groups


def _power_of_two_over(count: Any) -> float:
    """The largest power of two by which the sum of `count` numbers, each times it, is at most the largest of them.

    At least 2**-15, which is a normal float16; of a symbolic count, 2**-8 as a compromise.
    """
    return 2.0 ** -min(max(count - 1, 0).bit_length(), 15) if isinstance(count, int) else 2.0**-8
