"""Upsampling, and pixel shuffle and unshuffle, over any number of spatial axes."""

import itertools
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from mlax._jax import explicit_sharding
from mlax.ops._checks import check_floating
from mlax.ops._layout import Layout, parse_layout
from mlax.ops._windows import Sizes, sizes_per_axis

Interpolation = Literal["nearest", "linear"]


def upsample(
    x: Float[Array, "..."],
    factor: Sizes,
    by: Interpolation = "nearest",
    *,
    align_corners: bool = False,
    layout: str = "channel_last",
) -> Float[Array, "..."]:
    """Upsampling by `factor` along each spatial axis: (b, *spatial, c) to (b, *larger, c), in the dtype of `x`.

    "nearest" repeats each position; "linear" interpolates between two along each axis (bilinear, trilinear), as
    PyTorch does. The positions are the centers of pixels, the first and the last of which are repeated at the border,
    or with `align_corners` points, of which the first and the last stay where they are.
    """
    check_interpolation("upsample", by, align_corners)
    check_floating("upsample", x)
    axes = parse_layout("upsample", layout, x)
    for axis, times in zip(axes.spatial, sizes_per_axis("upsample", "factor", factor, x, axes), strict=True):
        if times > 1:
            x = _repeat(x, axis, times) if by == "nearest" else _interpolate(x, axis, times, align_corners)
    return x


def pixel_shuffle(x: Array, factor: Sizes, *, layout: str = "channel_last") -> Array:
    """Pixel shuffle: (b, *spatial, c * prod(factor)) to (b, *spatial * factor, c), in the dtype of `x`.

    The channels of a pixel are in the order (c, *factor), as in PyTorch. https://arxiv.org/abs/1609.05158, equation 4.
    """
    axes = parse_layout("pixel_shuffle", layout, x)
    factors = shuffle_factors("pixel_shuffle", x, axes, factor)
    x = lax.transpose(x, _channel_first(axes))
    b, c, *spatial = x.shape
    split = _reshape(x, (b, c // int(np.prod(factors)), *factors, *spatial))
    rank = len(factors)
    pairs = itertools.chain.from_iterable((2 + rank + axis, 2 + axis) for axis in range(rank))
    larger = [size * times for size, times in zip(spatial, factors, strict=True)]
    y = _reshape(lax.transpose(split, (0, 1, *pairs)), (b, split.shape[1], *larger))
    return lax.transpose(y, np.argsort(_channel_first(axes)))


def pixel_unshuffle(x: Array, factor: Sizes, *, layout: str = "channel_last") -> Array:
    """Pixel unshuffle: (b, *spatial, c) to (b, *spatial / factor, c * prod(factor)), in the dtype of `x`.

    The inverse of `pixel_shuffle`.
    """
    axes = parse_layout("pixel_unshuffle", layout, x)
    factors = unshuffle_factors("pixel_unshuffle", x, axes, factor)
    x = lax.transpose(x, _channel_first(axes))
    b, c, *spatial = x.shape
    smaller = [size // times for size, times in zip(spatial, factors, strict=True)]
    split = _reshape(x, (b, c, *itertools.chain.from_iterable(zip(smaller, factors, strict=True))))
    places = range(2, split.ndim, 2)
    y = lax.transpose(split, (0, 1, *(axis + 1 for axis in places), *places))
    y = _reshape(y, (b, c * int(np.prod(factors)), *smaller))
    return lax.transpose(y, np.argsort(_channel_first(axes)))


def shuffle_factors(name: str, x: Any, axes: Layout, factor: Sizes) -> tuple[int, ...]:
    """The factor of each spatial axis; raise if their product does not divide the channels of `x`."""
    factors = sizes_per_axis(name, "factor", factor, x, axes)
    if x.shape[axes.channel] % int(np.prod(factors)):
        raise ValueError(
            f"{name}: the input {x.shape} has {x.shape[axes.channel]} channels, but must have a multiple of "
            f"{int(np.prod(factors))}, the product of the factors {factors}."
        )
    return factors


def unshuffle_factors(name: str, x: Any, axes: Layout, factor: Sizes) -> tuple[int, ...]:
    """The factor of each spatial axis; raise if it does not divide its size."""
    factors = sizes_per_axis(name, "factor", factor, x, axes)
    if any(x.shape[axis] % times for axis, times in zip(axes.spatial, factors, strict=True)):
        raise ValueError(
            f"{name}: the spatial axes of the input {x.shape} must be multiples of the factors {factors}; pad or crop "
            "them."
        )
    return factors


def check_interpolation(name: str, by: str, align_corners: bool) -> None:
    """Raise unless `by` names an interpolation, which `align_corners` makes a difference to."""
    if by not in get_args(Interpolation):
        raise ValueError(f"{name}: by is {by!r}, but must be one of {', '.join(get_args(Interpolation))}.")
    if align_corners and by == "nearest":
        raise ValueError(
            f"{name}: align_corners makes no difference to by='nearest'; leave it out, or use by='linear'."
        )


def _channel_first(axes: Layout) -> tuple[int, ...]:
    return (axes.batch, axes.channel, *axes.spatial)


def _reshape(x: Array, shape: tuple[Any, ...]) -> Array:
    """`x.reshape(shape)`; over explicit mesh axes only the first axis stays sharded."""
    sharding = explicit_sharding(x, (0,))
    sharding = sharding and NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[0]))
    return x.reshape(shape, out_sharding=sharding)


def _repeat(x: Array, axis: int, times: int) -> Array:
    """Each element along an axis `times` times."""
    shape = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
    repeated = jnp.broadcast_to(lax.expand_dims(x, (axis + 1,)), shape)
    return repeated.reshape(*x.shape[:axis], x.shape[axis] * times, *x.shape[axis + 1 :])


def _interpolate(x: Array, axis: int, times: int, align_corners: bool) -> Array:
    """The axis `times` as long, each element between two of `x`."""
    size, larger = x.shape[axis], x.shape[axis] * times
    if align_corners:
        position = np.arange(larger) * ((size - 1) / max(larger - 1, 1))
    else:
        position = np.maximum((np.arange(larger) + 0.5) / times - 0.5, 0)
    below = np.minimum(np.floor(position).astype(np.int32), size - 1)
    above = np.minimum(below + 1, size - 1)
    share = (position - below).reshape([-1 if other == axis else 1 for other in range(x.ndim)])
    low, high = (jnp.take(x, index, axis=axis, mode="clip") for index in (below, above))
    return low * (1 - share).astype(x.dtype) + high * share.astype(x.dtype)
