"""The windows of convolutions and pooling along the spatial axes, and their padding."""

import functools
import itertools
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from mlax.ops._layout import Layout

Sizes = int | tuple[int, ...]  # one for all spatial axes, or one for each
Padding = str | int | tuple[int | tuple[int, int], ...]  # a mode, or sizes: (before, after), or one for both
PadWith = Literal["zeros", "circular", "reflect", "edge"]


class Windows(NamedTuple):
    """Windows over the spatial axes; each field has one entry for each axis."""

    count: tuple[int, ...]
    window: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # without the overhang
    overhang: tuple[int, ...]  # how far the last window extends beyond the padding

    def along(self, number: int) -> tuple[int, int, int, int]:
        """Count, window, stride and dilation along one spatial axis."""
        return self.count[number], self.window[number], self.strides[number], self.dilation[number]

    def element_counts(self, sizes: tuple[int, ...], count_padding: bool = False) -> list[np.ndarray]:
        """How many elements of each window lie on the input, or on the input and its padding, along each axis."""
        counts = []
        for axis, size in enumerate(sizes):
            low, high = self.padding[axis] if count_padding else (0, 0)
            starts = np.arange(self.count[axis])[:, None] * self.strides[axis] - self.padding[axis][0]
            positions = starts + np.arange(self.window[axis]) * self.dilation[axis]
            counts.append(((positions >= -low) & (positions < size + high)).sum(1))
        return counts


class TransposedWindows(NamedTuple):
    """The windows of a transposed convolution, as the convolution of the dilated input that computes it."""

    strides: tuple[int, ...]  # by which the input is dilated
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]


def resolve_windows(
    name: str,
    x: Any,
    layout: Layout,
    window: Sizes,
    strides: Sizes = 1,
    padding: Padding = "VALID",
    dilation: Sizes = 1,
    ceil: bool = False,
) -> Windows:
    """The windows over inputs like `x`; `name` is the caller, for error messages.

    `padding` is "VALID" for none; "SAME" for ceil(size / stride) windows, an odd one out after the end; "CAUSAL" for
    all of it before the start, so that no window reads a later position; or sizes. `ceil` lets the last window extend
    beyond the end, if it starts before it.
    """
    window, strides, dilation, spans = _window_sizes(name, x, layout, window, strides, dilation)
    sizes = tuple(x.shape[axis] for axis in layout.spatial)
    same = [_same_padding(*axis) for axis in zip(sizes, spans, strides, strict=True)]
    pads = _resolve_padding(name, padding, x, same, spans)
    count, overhang = [], []
    for size, span, stride, (low, high) in zip(sizes, spans, strides, pads, strict=True):
        room = size + low + high - span
        if room < 0:
            raise ValueError(
                f"{name}: the window covers {span} positions but the input {x.shape} has {size}, plus {low + high} of "
                "padding, along a spatial axis; use a smaller window, or more padding."
            )
        last = -(-room // stride) if ceil else room // stride
        if ceil and last * stride >= size + low:  # it would cover padding only
            last -= 1
        count.append(last + 1)
        overhang.append(max(0, last * stride - room))
    return Windows(tuple(count), window, strides, dilation, pads, tuple(overhang))


def resolve_transposed_windows(
    name: str,
    x: Any,
    layout: Layout,
    window: Sizes,
    strides: Sizes,
    padding: Padding,
    output_padding: Sizes,
    dilation: Sizes,
) -> TransposedWindows:
    """The windows of a transposed convolution of inputs like `x`; `name` is the caller, for error messages.

    n positions, a stride s and windows that span k positions give (n - 1) s + k - padding + output_padding positions,
    as in PyTorch. "VALID" crops nothing. "SAME" gives n s: it is the transpose of the "SAME" convolution of that many.
    "CAUSAL" gives n s too and crops at the end only: no output depends on a later input.
    """
    window, strides, dilation, spans = _window_sizes(name, x, layout, window, strides, dilation)
    extra = sizes_per_axis(name, "output_padding", output_padding, x, layout, least=0)
    excess = [span - stride for span, stride in zip(spans, strides, strict=True)]  # over n s; may be negative
    if padding == "CAUSAL":
        crops = tuple((0, each) for each in excess)
    else:
        same = [(max(0, each) // 2, each - max(0, each) // 2) for each in excess]
        crops = _resolve_padding(name, padding, x, same, spans)
    pads = []
    for axis, stride, span, (low, high), more in zip(layout.spatial, strides, spans, crops, extra, strict=True):
        if (x.shape[axis] - 1) * stride + span - low - high + more < 1:
            raise ValueError(
                f"{name}: the padding {(low, high)} crops all of axis {axis} of the output for the input {x.shape}; "
                "pass less padding."
            )
        pads.append((span - 1 - low, span - 1 - high + more))
    return TransposedWindows(strides, dilation, tuple(pads))


def sizes_per_axis(name: str, what: str, value: Sizes, x: Any, layout: Layout, least: int = 1) -> tuple[int, ...]:
    """One size for each spatial axis, from one for all or one for each."""
    rank = len(layout.spatial)
    values = value if isinstance(value, tuple) else (value,) * rank
    if len(values) != rank:
        lacks_axis = what == "window" and len(values) == rank + 1
        hint = ", or add the axis that is missing: x[..., None] for the channels, x[None] for the batch"
        hint = hint if lacks_axis and layout.channel == len(x.shape) - 1 else ""
        raise ValueError(
            f"{name}: {what} has {_count_axes(len(values))} but the input {x.shape} has "
            f"{_count_axes(rank, 'spatial ')}; pass {what}={((values or (least,)) * rank)[:rank]}{hint}."
        )
    if any(type(each) is not int or each < least for each in values):
        raise ValueError(f"{name}: {what} is {value}, but must be integers, {least} or more.")
    return values


def pad(
    x: Float[Array, "..."], axes: tuple[int, ...], widths: tuple[tuple[int, int], ...], pad_with: PadWith = "zeros"
) -> Float[Array, "..."]:
    """Padding: `x` padded by (before, after) along each of `axes`, in its dtype.

    The padding holds zeros; the elements of the other end ("circular"); the mirror image about the last element, which
    is not repeated ("reflect"); or the last element, repeated ("edge").
    """
    check_pad("pad", x.shape, axes, widths, pad_with)
    full = [(0, 0)] * x.ndim
    for axis, width in zip(axes, widths, strict=True):
        full[axis] = width
    return jnp.pad(x, full, mode={"zeros": "constant", "circular": "wrap"}.get(pad_with, pad_with))


def check_pad(
    name: str, shape: tuple[Any, ...], axes: tuple[int, ...], widths: tuple[tuple[int, int], ...], pad_with: str
) -> None:
    """Raise if the kind of padding does not exist, or needs more elements than the input has."""
    if pad_with not in get_args(PadWith):
        raise ValueError(f"{name}: pad_with is {pad_with!r}, but must be one of {', '.join(get_args(PadWith))}.")
    for axis, width in zip(axes, widths, strict=True):
        most = {"circular": shape[axis], "reflect": shape[axis] - 1}.get(pad_with, max(width))
        if max(width) > most:
            raise ValueError(
                f"{name}: the padding {width} is {pad_with} but axis {axis} of the input {shape} allows at most "
                f"{most}; pad less, or with zeros."
            )


def window_slices(x: Array, layout: Layout, windows: Windows) -> list[Array]:
    """For each element of a window, in row-major order, that element of every window, as one array."""
    pieces = [x]
    for number, axis in enumerate(layout.spatial):
        slices = [axis_window_slices(piece, axis, *windows.along(number)) for piece in pieces]
        pieces = list(itertools.chain.from_iterable(slices))
    return pieces


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3, 4, 5))
def axis_window_slices(x: Array, axis: int, count: int, window: int, stride: int, dilation: int) -> list[Array]:
    """The first element of every window along an axis, the second element of every window, and so on."""
    starts = range(0, window * dilation, dilation)
    return [lax.slice_in_dim(x, start, start + (count - 1) * stride + 1, stride, axis) for start in starts]


@axis_window_slices.defjvp
def _axis_window_slices_jvp(axis, count, window, stride, dilation, primals, tangents):
    """The same slices of the tangent, computed so that their transpose is fast.

    The transpose of a strided slice pads with interior zeros, which is slow on a CPU, once for each slice. Instead the
    axis is split into `stride` interleaved ones, whose transpose is a concatenation, and each slice is a contiguous
    slice of one of them.
    """
    (x,), (x_dot,) = primals, tangents
    length = -(-((count - 1) * stride + (window - 1) * dilation + 1) // stride)
    more = length * stride - x.shape[axis]
    x_dot = lax.pad(x_dot, np.zeros((), x.dtype), [(0, more if a == axis else 0, 0) for a in range(x.ndim)])
    interleaved = x_dot.reshape(*x.shape[:axis], length, stride, *x.shape[axis + 1 :])
    lanes = [lax.squeeze(lane, (axis + 1,)) for lane in lax.split(interleaved, (1,) * stride, axis + 1)]
    starts = [divmod(number * dilation, stride) for number in range(window)]
    dots = [lax.slice_in_dim(lanes[lane], start, start + count, 1, axis) for start, lane in starts]
    return axis_window_slices(x, axis, count, window, stride, dilation), dots


def _window_sizes(
    name: str, x: Any, layout: Layout, window: Sizes, strides: Sizes, dilation: Sizes
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Window, strides and dilation for each spatial axis, and the positions that a dilated window spans."""
    window = sizes_per_axis(name, "window", window, x, layout)
    strides = sizes_per_axis(name, "strides", strides, x, layout)
    dilation = sizes_per_axis(name, "dilation", dilation, x, layout)
    return window, strides, dilation, tuple((size - 1) * rate + 1 for size, rate in zip(window, dilation, strict=True))


def _same_padding(size: int, span: int, stride: int) -> tuple[int, int]:
    """The padding with which there are ceil(size / stride) windows."""
    total = max(0, (-(-size // stride) - 1) * stride + span - size)
    return total // 2, total - total // 2


def _resolve_padding(
    name: str, padding: Padding, x: Any, same: list[tuple[int, int]], spans: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """The padding before and after along each spatial axis, from a mode or from sizes."""
    match padding:
        case "SAME":
            return tuple(same)
        case "VALID":
            return ((0, 0),) * len(spans)
        case "CAUSAL":
            return tuple((span - 1, 0) for span in spans)
        case int():
            padding = (padding,) * len(spans)
        case str():
            raise ValueError(f"{name}: padding is {padding!r}, but must be 'SAME', 'VALID', 'CAUSAL' or sizes.")
    if len(padding) != len(spans):
        raise ValueError(
            f"{name}: padding has {_count_axes(len(padding))} but the input {x.shape} has "
            f"{_count_axes(len(spans), 'spatial ')}; pass a size or a pair (before, after) for each, such as "
            f"padding={((1, 1),) * len(spans)}."
        )
    pads = tuple((pad, pad) if isinstance(pad, int) else pad for pad in padding)
    if any(len(pad) != 2 or min(pad) < 0 for pad in pads):
        raise ValueError(f"{name}: padding is {padding}, but must be sizes before and after, 0 or more.")
    return pads


def _count_axes(count: int, kind: str = "") -> str:
    return f"{count} {kind}{'axis' if count == 1 else 'axes'}"
