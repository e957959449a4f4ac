"""Pooling: each window of the spatial axes, reduced to one number."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from mlax.ops._layout import Layout, layout_of
from mlax.ops._windows import Padding, Sizes, Windows, all_places, places, windows

Combine = Callable[[Any, Any], Any]  # of two arrays, element by element; associative
FEW = 16  # places of a window that are combined one by one


def pool(
    x: Float[Array, "..."],
    combine: Combine,
    start: float,
    window: Sizes,
    *,
    strides: Sizes | None = None,
    padding: Padding = "VALID",
    dilation: Sizes = 1,
    ceil: bool = False,
    layout: str = "channel_last",
    accum_dtype: Any = None,
) -> Float[Array, "..."]:
    """The elements of each window combined, in order: (b, *spatial, c) to (b, *windows, c), in the dtype of `x`.

    `combine(a, b)` is associative and `start` changes nothing, `combine(start, a) == a`; the padding holds it.
    Windows lie side by side unless `strides` says otherwise. `ceil` lets the last one hang over the end. All of it
    runs in `accum_dtype` if one is given. `pool(x, larger, -math.inf, 2)` is max pooling, and its gradient goes to
    the first of equal elements, in row-major order, as in PyTorch.

    XLA's own `reduce_window` is some ten times slower on a CPU, in its gradient above all. So the windows are
    combined by whole arrays: the first place of every window with the second place of every window, and so on.
    """
    axes = layout_of("pool", layout, x)
    where = pool_windows("pool", x, layout, window, strides, padding, dilation, ceil)
    wide = x if accum_dtype is None else lax.convert_element_type(x, accum_dtype)
    y = _padded(wide, axes, where, start)
    apart = all(stride >= window for stride, window in zip(where.strides, where.window, strict=True))
    if combine is larger and math.prod(where.window) <= FEW:
        y = _largest(all_places(y, axes, where))
    elif apart and math.prod(where.window) <= FEW:
        y = functools.reduce(combine, all_places(y, axes, where))
    else:
        for number, axis in reversed(list(enumerate(axes.spatial))):
            y = _along(y, axis, combine, *where.along(number))
    return lax.convert_element_type(y, x.dtype)


def mean_pool(
    x: Float[Array, "..."],
    window: Sizes,
    *,
    strides: Sizes | None = None,
    padding: Padding = "VALID",
    dilation: Sizes = 1,
    ceil: bool = False,
    count_padding: bool = False,
    layout: str = "channel_last",
    accum_dtype: Any = None,
) -> Float[Array, "..."]:
    """The mean of each window, over the elements of `x` in it, or over the padding too if `count_padding`.

    What hangs over the padding (by `ceil`) never counts. The rest is as in `pool`.
    """
    axes = layout_of("mean_pool", layout, x)
    where = pool_windows("mean_pool", x, layout, window, strides, padding, dilation, ceil)
    wide = x if accum_dtype is None else lax.convert_element_type(x, accum_dtype)
    total = pool(
        wide, lax.add, 0.0, window, strides=strides, padding=padding, dilation=dilation, ceil=ceil, layout=layout
    )
    held = where.held(tuple(x.shape[axis] for axis in axes.spatial), count_padding)
    if all((each == each[0]).all() for each in held):
        return lax.convert_element_type(total / math.prod(int(each[0]) for each in held), x.dtype)
    counts = np.ones((1,) * x.ndim)
    for axis, each in zip(axes.spatial, held, strict=True):
        counts = counts * each.reshape([-1 if other == axis else 1 for other in range(x.ndim)])
    return lax.convert_element_type(total / counts.astype(total.dtype), x.dtype)


def pool_windows(
    name: str,
    x: Any,
    layout: str,
    window: Sizes,
    strides: Sizes | None,
    padding: Padding,
    dilation: Sizes,
    ceil: bool,
) -> Windows:
    """Where the windows of a pooling lie; `name` is who asks, for the errors."""
    axes = layout_of(name, layout, x)
    where = windows(name, x, axes, window, window if strides is None else strides, padding, dilation, ceil)
    sizes = tuple(x.shape[axis] for axis in axes.spatial)
    if any((held == 0).any() for held in where.held(sizes)):
        raise ValueError(
            f"{name}: a window holds nothing but padding, for the input {x.shape}; pass less padding, or a larger "
            "window."
        )
    return where


@jax.custom_jvp
def larger(a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """The larger of two, element by element; NaN if either is. The gradient goes to the first where they are equal."""
    return lax.max(a, b)


@larger.defjvp
def _larger_jvp(primals, tangents):
    (a, b), (a_dot, b_dot) = primals, tangents
    return larger(a, b), lax.select(b > a, b_dot, a_dot)


@jax.custom_jvp
def _largest(pieces: list[Array]) -> Array:
    """The largest of several, as `larger` of each and the next would give it."""
    return functools.reduce(lax.max, pieces)


@_largest.defjvp
def _largest_jvp(primals, tangents):
    """Which of them it is is kept for the derivative, one byte for each window, and not all of their elements."""
    (pieces,), (dots,) = primals, tangents
    best, which = pieces[0], lax.full_like(pieces[0], 0, np.uint8)
    for place, piece in enumerate(pieces[1:], 1):
        which = lax.select(piece > best, lax.full_like(which, place), which)
        best = lax.max(best, piece)
    if jax.default_backend() == "cpu":
        which = lax.optimization_barrier(which)  # else XLA finds it again, from elements that it has to keep
    parts = [lax.select(which == place, dot, lax.full_like(dot, 0)) for place, dot in enumerate(dots)]
    return _largest(pieces), functools.reduce(lax.add, parts)


def _padded(x: Array, axes: Layout, where: Windows, start: float) -> Array:
    widths = [(0, 0, 0)] * x.ndim
    for axis, (low, high), over in zip(axes.spatial, where.padding, where.overhang, strict=True):
        widths[axis] = (low, high + over, 0)
    return lax.pad(x, np.asarray(start, x.dtype), widths) if any(map(any, widths)) else x


def _along(x: Array, axis: int, combine: Combine, count: int, window: int, stride: int, dilation: int) -> Array:
    """Combine along one axis; windows of many places by steps, so that the number of arrays stays small."""
    if window <= FEW:
        return functools.reduce(combine, places(x, axis, count, window, stride, dilation))
    part = next((part for part in range(FEW, 1, -1) if window % part == 0), 1)
    if dilation == 1 and stride == window and part > 1:
        x = _along(x, axis, combine, count * window // part, part, part, 1)
        return _along(x, axis, combine, count, window // part, window // part, 1)
    return _by_runs(x, axis, combine, count, window, stride, dilation)


def _by_runs(x: Array, axis: int, combine: Combine, count: int, window: int, stride: int, dilation: int) -> Array:
    """Combine along one axis by runs of 1, 2, 4... places: a window of n takes log n arrays."""
    total: Any = None
    covered, run, length = 0, x, 1
    while True:
        if window & length:
            start = covered * dilation
            piece = lax.slice_in_dim(run, start, start + (count - 1) * stride + 1, stride, axis)
            total = piece if total is None else combine(total, piece)
            covered += length
        if covered == window:
            return total
        step = length * dilation
        size = run.shape[axis] - step
        run = combine(lax.slice_in_dim(run, 0, size, 1, axis), lax.slice_in_dim(run, step, step + size, 1, axis))
        length *= 2
