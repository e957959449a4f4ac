"""Pooling over windows, over bins and over all positions, and the extraction of patches.

XLA's `reduce_window` is about ten times slower on a CPU, in its gradient above all, and only its sums and maxima have
one. So windows are reduced by combining whole arrays: the first element of every window with the second element of
every window, and so on.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from mlax._jax import explicit_sharding, is_narrow, reduce_mean, reduce_sum, with_vjp
from mlax.core import check_is_dtype
from mlax.ops._checks import check_floating
from mlax.ops._cpu import materialize
from mlax.ops._image_forms import gather_pool_grad, prefers_fused_max, prefers_gathered_pool_grad
from mlax.ops._layout import Layout, parse_layout
from mlax.ops._windows import Padding, Sizes, Windows, axis_window_slices, pad, resolve_windows, window_slices

Combine = Callable[[Any, Any], Any]  # of two arrays, elementwise; associative
Reduction = Literal["mean", "max", "sum"]
MAX_UNROLLED = 16  # elements of a window that are combined one by one


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
    """Pooling: reduce the elements of each window, in order: (b, *spatial, c) to (b, *windows, c), in the dtype of `x`.

    `combine(a, b)` is associative and `start` is its identity, `combine(start, a) == a`; the padding holds it.
    `strides` are the window's sizes unless given. `ceil` lets the last window extend beyond the end. It is computed in
    `accum_dtype` if given.
    """
    check_is_dtype("pool", accum_dtype=accum_dtype)
    axes = parse_layout("pool", layout, x)
    windows = resolve_pool_windows("pool", x, layout, window, strides, padding, dilation, ceil)
    wide = x if accum_dtype is None else lax.convert_element_type(x, accum_dtype)
    y = _reduce_windows(_pad_windows(wide, axes, windows, start), axes, windows, combine)
    return lax.convert_element_type(y, x.dtype)


def max_pool(
    x: Float[Array, "..."],
    window: Sizes,
    *,
    strides: Sizes | None = None,
    padding: Padding = "VALID",
    dilation: Sizes = 1,
    ceil: bool = False,
    layout: str = "channel_last",
) -> Float[Array, "..."]:
    """Max pooling: the maximum of each window; NaN if one is. The rest is as in `pool`.

    The gradient goes to the first of equal elements, in row-major order, as in PyTorch.
    """
    return pool(
        x,
        maximum,
        -math.inf,
        window,
        strides=strides,
        padding=padding,
        dilation=dilation,
        ceil=ceil,
        layout=layout,
    )


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
    """Average pooling: the mean of each window, over the elements of `x` in it, or over the padding too if
    `count_padding`.

    Positions beyond the padding (by `ceil`) never count. The rest is as in `pool`.
    """
    check_is_dtype("mean_pool", accum_dtype=accum_dtype)
    axes = parse_layout("mean_pool", layout, x)
    windows = resolve_pool_windows("mean_pool", x, layout, window, strides, padding, dilation, ceil)
    wide = x if accum_dtype is None else lax.convert_element_type(x, accum_dtype)
    padded = _pad_windows(wide, axes, windows, 0.0)
    counts = windows.element_counts(tuple(x.shape[axis] for axis in axes.spatial), count_padding)
    if is_narrow(wide.dtype):
        return _narrow_mean(padded, axes, windows, counts)
    total = _reduce_windows(padded, axes, windows, lax.add)
    if all((each == each[0]).all() for each in counts):
        return lax.convert_element_type(total / math.prod(int(each[0]) for each in counts), x.dtype)
    divisor = np.ones((1,) * x.ndim)
    for axis, each in zip(axes.spatial, counts, strict=True):
        divisor = divisor * each.reshape([-1 if other == axis else 1 for other in range(x.ndim)])
    return lax.convert_element_type(total / divisor.astype(total.dtype), x.dtype)


def global_pool(
    x: Float[Array, "..."],
    by: Reduction = "mean",
    *,
    keep_axes: bool = False,
    layout: str = "channel_last",
    accum_dtype: Any = None,
) -> Float[Array, "..."]:
    """Global pooling: the mean, maximum or sum over all positions: (b, *spatial, c) to (b, c), in the dtype of `x`.

    With `keep_axes` the spatial axes remain, of size 1. Sums are taken in `accum_dtype` if given. The gradient of the
    maximum goes to the first of equal elements.
    """
    check_is_dtype("global_pool", accum_dtype=accum_dtype)
    check_reduction("global_pool", by)
    check_floating("global_pool", x)
    axes = parse_layout("global_pool", layout, x).spatial
    wide = x if accum_dtype is None or by == "max" else lax.convert_element_type(x, accum_dtype)
    return lax.convert_element_type(_reduce_axes(wide, axes, by, keep_axes), x.dtype)


def adaptive_pool(
    x: Float[Array, "..."],
    size: int | tuple[int | None, ...],
    by: Reduction = "mean",
    *,
    layout: str = "channel_last",
    accum_dtype: Any = None,
) -> Float[Array, "..."]:
    """Adaptive pooling: the mean, maximum or sum of each of `size` bins along each spatial axis, in the dtype of `x`.

    Bin i of m over n positions is PyTorch's: from floor(i n / m) up to ceil((i + 1) n / m), so that bins overlap
    where m does not divide n. A size of None leaves its axis as it is.
    """
    check_is_dtype("adaptive_pool", accum_dtype=accum_dtype)
    check_reduction("adaptive_pool", by)
    check_floating("adaptive_pool", x)
    axes = parse_layout("adaptive_pool", layout, x)
    sizes = adaptive_sizes("adaptive_pool", size, x, axes)
    spatial = tuple(x.shape[axis] for axis in axes.spatial)
    if all(n % m == 0 for n, m in zip(spatial, sizes, strict=True)):
        window = tuple(n // m for n, m in zip(spatial, sizes, strict=True))
        match by:
            case "mean":
                return mean_pool(x, window, layout=layout, accum_dtype=accum_dtype)
            case "max":
                return max_pool(x, window, layout=layout)
            case "sum":
                return pool(x, lax.add, 0.0, window, layout=layout, accum_dtype=accum_dtype)
    y = x if accum_dtype is None or by == "max" else lax.convert_element_type(x, accum_dtype)
    for axis, bins in zip(reversed(axes.spatial), reversed(sizes), strict=True):
        y = _reduce_bins(y, axis, bins, by)
    return lax.convert_element_type(y, x.dtype)


def patches(
    x: Float[Array, "..."],
    window: Sizes,
    *,
    strides: Sizes | None = None,
    padding: Padding = "VALID",
    dilation: Sizes = 1,
    layout: str = "channel_last",
) -> Float[Array, "..."]:
    """Patch extraction: the elements of each window as features: (b, *spatial, c) to (b, *windows, window * c), in the
    dtype of `x`.

    They are in the order of a kernel's axes in the layout, so that a convolution is the product of the patches with
    its flattened kernel. `strides` are the window's sizes unless given.
    """
    axes = parse_layout("patches", layout, x)
    windows = resolve_windows("patches", x, axes, window, window if strides is None else strides, padding, dilation)
    x = pad(x, axes.spatial, windows.padding) if any(map(any, windows.padding)) else x
    rank = x.ndim
    for number, axis in enumerate(axes.spatial):  # axis becomes the windows, and a new last axis their elements
        count, size, stride, rate = windows.along(number)
        if stride == size and rate == 1:
            covered = lax.slice_in_dim(x, 0, count * size, 1, axis)
            split = covered.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
            x = jnp.moveaxis(split, axis + 1, -1)
        else:
            x = jnp.stack(axis_window_slices(x, axis, count, size, stride, rate), -1)
    kernel_axes = {axes.inputs: axes.channel, **{axis: rank + number for number, axis in enumerate(axes.window)}}
    order = [axis for axis in range(rank) if axis != axes.channel]
    order[axes.channel : axes.channel] = [kernel_axes[axis] for axis in sorted(kernel_axes)]
    x = lax.transpose(x, order)
    features = math.prod(x.shape[axes.channel : axes.channel + len(kernel_axes)])
    return x.reshape(*x.shape[: axes.channel], features, *x.shape[axes.channel + len(kernel_axes) :])


def resolve_pool_windows(
    name: str,
    x: Any,
    layout: str,
    window: Sizes,
    strides: Sizes | None,
    padding: Padding,
    dilation: Sizes,
    ceil: bool,
) -> Windows:
    """The windows of a pooling over inputs like `x`; `name` is the caller, for error messages."""
    axes = parse_layout(name, layout, x)
    check_floating(name, x)
    windows = resolve_windows(name, x, axes, window, window if strides is None else strides, padding, dilation, ceil)
    counts = windows.element_counts(tuple(x.shape[axis] for axis in axes.spatial))
    if any((each == 0).any() for each in counts):
        raise ValueError(
            f"{name}: a window holds nothing but padding, for the input {x.shape}; pass less padding, or a larger "
            "window."
        )
    return windows


def adaptive_sizes(name: str, size: int | tuple[int | None, ...], x: Any, axes: Layout) -> tuple[int, ...]:
    """The number of bins along each spatial axis; `name` is the caller, for error messages."""
    rank = len(axes.spatial)
    sizes = size if isinstance(size, tuple) else (size,) * rank
    if len(sizes) != rank:
        raise ValueError(
            f"{name}: size has {len(sizes)} entries but the input {x.shape} has {rank} spatial axes; "
            f"pass size={((sizes or (1,)) * rank)[:rank]}."
        )
    sizes = tuple(x.shape[axis] if size is None else size for axis, size in zip(axes.spatial, sizes, strict=True))
    if any(type(each) is not int or each < 1 for each in sizes):
        raise ValueError(f"{name}: size is {size}, but must be integers, 1 or more, or None.")
    return sizes


def check_reduction(name: str, by: str) -> None:
    """Raise unless `by` names a reduction."""
    if by not in get_args(Reduction):
        raise ValueError(f"{name}: by is {by!r}, but must be one of {', '.join(get_args(Reduction))}.")


@jax.custom_jvp
def maximum(a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """The elementwise maximum, NaN if either is; the gradient goes to the first where they are equal."""
    return lax.max(a, b)


@maximum.defjvp
def _maximum_jvp(primals, tangents):
    (a, b), (a_dot, b_dot) = primals, tangents
    return maximum(a, b), lax.select(b > a, b_dot, a_dot)


def _pad_windows(x: Array, axes: Layout, windows: Windows, start: float) -> Array:
    widths = [(0, 0, 0)] * x.ndim
    for axis, (low, high), over in zip(axes.spatial, windows.padding, windows.overhang, strict=True):
        widths[axis] = (low, high + over, 0)
    return lax.pad(x, np.asarray(start, x.dtype), widths) if any(map(any, widths)) else x


def _reduce_windows(x: Array, axes: Layout, windows: Windows, combine: Combine) -> Array:
    """Reduce each window of a padded input, at once if that takes few slices, else along one axis after the other."""
    is_small = math.prod(windows.window) <= MAX_UNROLLED
    is_disjoint = all(stride >= window for stride, window in zip(windows.strides, windows.window, strict=True))
    if combine is maximum and is_small:
        return _max_of_windows(x, axes, windows)
    if is_disjoint and is_small:
        return _fold(combine, window_slices(x, axes, windows))
    for number, axis in reversed(list(enumerate(axes.spatial))):
        x = _reduce_axis(x, axis, combine, *windows.along(number))
    return x


def _fold(combine: Combine, slices: list[Array]) -> Array:
    """Combine arrays in order: in a narrow dtype in pairs, then pairs of pairs, so that few roundings add up."""
    while is_narrow(slices[0].dtype) and len(slices) > 2:
        pairs = [combine(*pair) for pair in zip(slices[::2], slices[1::2], strict=False)]
        slices = pairs + slices[len(slices) - len(slices) % 2 :]
    return functools.reduce(combine, slices)


def _narrow_mean(x: Array, axes: Layout, windows: Windows, counts: list[np.ndarray]) -> Array:
    """The mean of each window of a padded input in float16 or bfloat16, along one axis after the other.

    By one after the other, few bits are shifted out of the small numbers of float16.
    """
    for number, axis in reversed(list(enumerate(axes.spatial))):
        before = _divisor_before(x.dtype, windows.window[number])
        total = _reduce_axis(x / before, axis, lax.add, *windows.along(number))
        rest = (counts[number] / before).reshape([-1 if other == axis else 1 for other in range(x.ndim)])
        x = total / rest.astype(x.dtype)
    return x


def _divisor_before(dtype: Any, count: int) -> float:
    """A power of two to divide by before the sum of a mean, so that float16, which ends at 65504, does not overflow."""
    return 2.0 ** min((count - 1).bit_length(), 15) if dtype == jnp.float16 else 1.0


def _max_of_windows(x: Array, axes: Layout, windows: Windows) -> Array:
    """The maximum of each window of a padded input, as `maximum` of each element and the next would give it."""

    def plain(x: Array, consts: None = None) -> Array:
        return _max_of_slices(window_slices(x, axes, windows))

    def forward(x: Array, consts: None) -> tuple[Array, Array]:
        return _max_and_argmax(window_slices(x, axes, windows))

    def backward(argmax: Array, x: Array, consts: None, y_grad: Array) -> Array:
        return gather_pool_grad(argmax, y_grad, x.shape, axes, windows)

    if not prefers_gathered_pool_grad(x, windows):
        return plain(x)
    gathered = with_vjp(plain, forward, backward)
    return _with_fused_value(gathered, axes, windows)(x) if prefers_fused_max(x) else gathered(x)


def _with_fused_value(max_of_windows: Any, axes: Layout, windows: Windows) -> Any:
    """`max_of_windows`, whose value is computed by `reduce_window` where it is not differentiated."""
    fused = jax.custom_jvp(lambda x: _reduce_window_max(x, axes, windows))
    fused.defjvp(lambda primals, tangents: jax.jvp(max_of_windows, primals, tangents))
    return fused


def _reduce_window_max(x: Array, axes: Layout, windows: Windows) -> Array:
    sizes, strides = [1] * x.ndim, [1] * x.ndim
    for axis, size, stride in zip(axes.spatial, windows.window, windows.strides, strict=True):
        sizes[axis], strides[axis] = size, stride
    return lax.reduce_window(x, -np.inf, lax.max, sizes, strides, "VALID")


@jax.custom_jvp
def _max_of_slices(slices: list[Array]) -> Array:
    return functools.reduce(lax.max, slices)


@_max_of_slices.defjvp
def _max_of_slices_jvp(primals, tangents):
    """The residual is the index of the maximum, one byte for each window, not all elements of the windows."""
    (slices,), (dots,) = primals, tangents
    _, argmax = _max_and_argmax(slices)
    argmax = materialize(argmax)  # else XLA recomputes it, from elements that it has to keep
    parts = [lax.select(argmax == number, dot, lax.full_like(dot, 0)) for number, dot in enumerate(dots)]
    return _max_of_slices(slices), functools.reduce(lax.add, parts)


def _max_and_argmax(slices: list[Array]) -> tuple[Array, Array]:
    """The maximum of several arrays, and the index of the first that has it."""
    top, argmax = slices[0], lax.full_like(slices[0], 0, np.uint8)
    for number, each in enumerate(slices[1:], 1):
        argmax = lax.select(each > top, lax.full_like(argmax, number), argmax)
        top = lax.max(top, each)
    return top, argmax


def _reduce_axis(x: Array, axis: int, combine: Combine, count: int, window: int, stride: int, dilation: int) -> Array:
    """Reduce windows along one axis; long ones in several steps, so that few arrays are combined."""
    if window <= MAX_UNROLLED:
        return _fold(combine, axis_window_slices(x, axis, count, window, stride, dilation))
    part = next((part for part in range(MAX_UNROLLED, 1, -1) if window % part == 0), 1)
    if dilation == 1 and stride == window and part > 1:
        x = _reduce_axis(x, axis, combine, count * window // part, part, part, 1)
        return _reduce_axis(x, axis, combine, count, window // part, window // part, 1)
    return _reduce_by_doubling(x, axis, combine, count, window, stride, dilation)


def _reduce_by_doubling(
    x: Array, axis: int, combine: Combine, count: int, window: int, stride: int, dilation: int
) -> Array:
    """Reduce windows along one axis by runs of 1, 2, 4... elements: a window of n takes log n arrays."""
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


def _reduce_bins(x: Array, axis: int, bins: int, by: Reduction) -> Array:
    """Reduce each bin along one axis: each by itself, or the first element of every bin with the second of every..."""
    starts = np.arange(bins) * x.shape[axis] // bins
    lengths = -(-np.arange(1, bins + 1) * x.shape[axis] // bins) - starts
    if bins <= lengths.max():
        pieces = [
            lax.slice_in_dim(x, int(start), int(start + length), 1, axis)
            for start, length in zip(starts, lengths, strict=True)
        ]
        return lax.concatenate([_reduce_axes(piece, (axis,), by, keep_axes=True) for piece in pieces], axis)
    along = [-1 if other == axis else 1 for other in range(x.ndim)]

    before = _divisor_before(x.dtype, int(lengths.max())) if by == "mean" else 1.0
    x = x / before if before > 1 else x

    def element(number: int) -> Array:
        piece = jnp.take(x, starts + np.minimum(number, lengths - 1), axis=axis, mode="clip")
        return piece if by == "max" else piece * (number < lengths).reshape(along).astype(x.dtype)

    y = _fold(maximum if by == "max" else lax.add, list(map(element, range(lengths.max()))))
    return y / (lengths / before).reshape(along).astype(x.dtype) if by == "mean" else y


def _reduce_axes(x: Array, axes: tuple[int, ...], by: Reduction, keep_axes: bool) -> Array:
    y = {"mean": reduce_mean, "max": _global_max, "sum": reduce_sum}[by](x, axes)
    return lax.expand_dims(y, axes) if keep_axes else y


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _global_max(x: Array, axes: tuple[int, ...]) -> Array:
    return lax.reduce_max(x, axes)


@_global_max.defjvp
def _global_max_jvp(axes, primals, tangents):
    (x,), (x_dot,) = primals, tangents
    y = _global_max(x, axes)
    order = lax.iota(np.int32, math.prod(x.shape[axis] for axis in axes)).reshape([x.shape[axis] for axis in axes])
    order = lax.broadcast_in_dim(order, x.shape, axes, out_sharding=explicit_sharding(x))
    first = lax.reduce_min(lax.select(x == lax.expand_dims(y, axes), order, lax.full_like(order, order.size)), axes)
    is_first = order == lax.expand_dims(first, axes)
    return y, lax.reduce_sum(lax.select(is_first, x_dot, lax.full_like(x_dot, 0)), axes)
