"""Pooling of all places into one, or into a given number of bins."""

import functools
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from mlax._jax import explicit_sharding
from mlax.ops._layout import Layout, layout_of
from mlax.ops._pool import larger, mean_pool, pool

PoolBy = Literal["mean", "max", "sum"]


def global_pool(
    x: Float[Array, "..."],
    by: PoolBy = "mean",
    *,
    keep_axes: bool = False,
    layout: str = "channel_last",
    accum_dtype: Any = None,
) -> Float[Array, "..."]:
    """The mean, largest or sum of all places: (b, *spatial, c) to (b, c), in the dtype of `x`.

    Spatial axes stay, of size 1, if `keep_axes`. Added up in `accum_dtype` if one is given. The gradient of the
    largest goes to the first of equal elements.
    """
    check_by("global_pool", by)
    axes = layout_of("global_pool", layout, x).spatial
    if by == "max":
        y = _largest(x, axes)
    else:
        wide = x if accum_dtype is None else lax.convert_element_type(x, accum_dtype)
        y = lax.reduce_sum(wide, axes)
        y = y / math.prod(x.shape[axis] for axis in axes) if by == "mean" else y
        y = lax.convert_element_type(y, x.dtype)
    return lax.expand_dims(y, axes) if keep_axes else y


def adaptive_pool(
    x: Float[Array, "..."],
    size: int | tuple[int | None, ...],
    by: PoolBy = "mean",
    *,
    layout: str = "channel_last",
    accum_dtype: Any = None,
) -> Float[Array, "..."]:
    """The mean, largest or sum of each of `size` bins along each spatial axis, in the dtype of `x`.

    Bin i of m over n places is PyTorch's: from floor(i n / m) up to ceil((i + 1) n / m), so that bins overlap
    where m does not divide n. A size of None leaves its axis as it is.
    """
    check_by("adaptive_pool", by)
    axes = layout_of("adaptive_pool", layout, x)
    sizes = adaptive_sizes("adaptive_pool", size, x, axes)
    before = tuple(x.shape[axis] for axis in axes.spatial)
    if all(n % m == 0 for n, m in zip(before, sizes, strict=True)):
        window = tuple(n // m for n, m in zip(before, sizes, strict=True))
        match by:
            case "mean":
                return mean_pool(x, window, layout=layout, accum_dtype=accum_dtype)
            case "max":
                return pool(x, larger, -math.inf, window, layout=layout)
            case "sum":
                return pool(x, lax.add, 0.0, window, layout=layout, accum_dtype=accum_dtype)
    y = x if accum_dtype is None or by == "max" else lax.convert_element_type(x, accum_dtype)
    for axis, bins in zip(reversed(axes.spatial), reversed(sizes), strict=True):
        y = _bins(y, axis, bins, by)
    return lax.convert_element_type(y, x.dtype)


def adaptive_sizes(name: str, size: int | tuple[int | None, ...], x: Any, axes: Layout) -> tuple[int, ...]:
    """How many bins along each spatial axis; `name` is who asks, for the errors."""
    rank = len(axes.spatial)
    sizes = size if isinstance(size, tuple) else (size,) * rank
    if len(sizes) != rank:
        raise ValueError(
            f"{name}: size has {len(sizes)} numbers but the input {x.shape} has {rank} spatial axes; "
            f"pass size={((sizes or (1,)) * rank)[:rank]}."
        )
    sizes = tuple(x.shape[axis] if size is None else size for axis, size in zip(axes.spatial, sizes, strict=True))
    if any(type(each) is not int or each < 1 for each in sizes):
        raise ValueError(f"{name}: size is {size}, but must be whole numbers, 1 or more, or None.")
    return sizes


def check_by(name: str, by: str) -> None:
    """Refuse a word that names no reduction."""
    if by not in get_args(PoolBy):
        raise ValueError(f"{name}: by is {by!r}, but must be one of {', '.join(get_args(PoolBy))}.")


def _bins(x: Array, axis: int, bins: int, by: PoolBy) -> Array:
    """Reduce each bin along one axis: the first place of every bin, with the second place of every bin..."""
    starts = np.arange(bins) * x.shape[axis] // bins
    lengths = -(-np.arange(1, bins + 1) * x.shape[axis] // bins) - starts
    along = [-1 if other == axis else 1 for other in range(x.ndim)]

    def place(number: int) -> Array:
        piece = jnp.take(x, starts + np.minimum(number, lengths - 1), axis=axis, mode="clip")
        return piece if by == "max" else piece * (number < lengths).reshape(along).astype(x.dtype)

    y = functools.reduce(larger if by == "max" else lax.add, map(place, range(lengths.max())))
    return y / lengths.reshape(along).astype(x.dtype) if by == "mean" else y


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _largest(x: Array, axes: tuple[int, ...]) -> Array:
    return lax.reduce_max(x, axes)


@_largest.defjvp
def _largest_jvp(axes, primals, tangents):
    (x,), (x_dot,) = primals, tangents
    y = _largest(x, axes)
    order = lax.iota(np.int32, math.prod(x.shape[axis] for axis in axes)).reshape([x.shape[axis] for axis in axes])
    order = lax.broadcast_in_dim(order, x.shape, axes, out_sharding=explicit_sharding(x))
    first = lax.reduce_min(lax.select(x == lax.expand_dims(y, axes), order, lax.full_like(order, order.size)), axes)
    chosen = order == lax.expand_dims(first, axes)
    return y, lax.reduce_sum(lax.select(chosen, x_dot, lax.full_like(x_dot, 0)), axes)
