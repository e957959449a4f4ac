"""Patches: each window of the spatial axes as one vector."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlax.ops._layout import layout_of
from mlax.ops._pad import pad
from mlax.ops._windows import Padding, Sizes, places, windows


def patches(
    x: Float[Array, "..."],
    window: Sizes,
    *,
    strides: Sizes | None = None,
    padding: Padding = "VALID",
    dilation: Sizes = 1,
    layout: str = "channel_last",
) -> Float[Array, "..."]:
    """The elements of each window as features: (b, *spatial, c) to (b, *windows, window * c), exact copies.

    Their order is that of a kernel's axes in the layout, so that a convolution is a product of the patches with
    its flattened kernel. Windows lie side by side unless `strides` says otherwise.
    """
    axes = layout_of("patches", layout, x)
    where = windows("patches", x, axes, window, window if strides is None else strides, padding, dilation)
    x = pad(x, axes.spatial, where.padding) if any(map(any, where.padding)) else x
    rank = x.ndim
    for number, axis in enumerate(axes.spatial):  # axis becomes the windows, and a new last axis their places
        count, size, stride, rate = where.along(number)
        if stride == size and rate == 1:
            whole = lax.slice_in_dim(x, 0, count * size, 1, axis)
            apart = whole.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
            x = jnp.moveaxis(apart, axis + 1, -1)
        else:
            x = jnp.stack(places(x, axis, count, size, stride, rate), -1)
    of_kernel = {axes.inputs: axes.channel, **{axis: rank + number for number, axis in enumerate(axes.window)}}
    order = [axis for axis in range(rank) if axis != axes.channel]
    order[axes.channel : axes.channel] = [of_kernel[axis] for axis in sorted(of_kernel)]
    x = lax.transpose(x, order)
    features = math.prod(x.shape[axes.channel : axes.channel + len(of_kernel)])
    return x.reshape(*x.shape[: axes.channel], features, *x.shape[axes.channel + len(of_kernel) :])
