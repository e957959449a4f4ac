"""The windows of convolutions and pooling, and their padding."""

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
Padding = str | int | tuple[int | tuple[int, int], ...]  # a word, or places: before and after, or one for both


class Windows(NamedTuple):
    """How many windows there are along each spatial axis, and where."""

    count: tuple[int, ...]
    window: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # without the overhang
    overhang: tuple[int, ...]  # by how much the last window goes beyond the padding

    def along(self, number: int) -> tuple[int, int, int, int]:
        """Count, window, stride and dilation along one spatial axis."""
        return self.count[number], self.window[number], self.strides[number], self.dilation[number]

    def held(self, sizes: tuple[int, ...], padding: bool = False) -> list[np.ndarray]:
        """How many places of each window lie on the input, or on the input and its padding, along each axis."""
        held = []
        for axis, size in enumerate(sizes):
            low, high = self.padding[axis]
            starts = np.arange(self.count[axis])[:, None] * self.strides[axis] - low
            places = starts + np.arange(self.window[axis]) * self.dilation[axis]
            inside = (places >= -low) & (places < size + high) if padding else (places >= 0) & (places < size)
            held.append(inside.sum(1))
        return held


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
    """Where windows lie over inputs like `x`; `name` is who asks, for the errors.

    `padding` is "VALID" for none; "SAME" for as many windows as the input has places, divided by the stride and
    rounded up, the odd place after; "CAUSAL" for all of it before, so that no window sees what comes after its
    own place; or places. `ceil` lets the last window hang over the end, if it starts before it.
    """
    window = sizes_per_axis(name, "window", window, x, layout)
    strides = sizes_per_axis(name, "strides", strides, x, layout)
    dilation = sizes_per_axis(name, "dilation", dilation, x, layout)
    spans = tuple((size - 1) * rate + 1 for size, rate in zip(window, dilation, strict=True))
    sizes = tuple(x.shape[axis] for axis in layout.spatial)
    pads = resolve_padding(
        name, padding, x, [same_padding(*axis) for axis in zip(sizes, spans, strides, strict=True)], spans
    )
    count, overhang = [], []
    for size, span, stride, (low, high) in zip(sizes, spans, strides, pads, strict=True):
        room = size + low + high - span
        if room < 0:
            raise ValueError(
                f"{name}: the window covers {span} places but the input {x.shape} has {size}, and {low + high} of "
                "padding, along a spatial axis; use a smaller window, or more padding."
            )
        fits = -(-room // stride) if ceil else room // stride
        if ceil and fits * stride >= size + low:  # it would hold padding only
            fits -= 1
        count.append(fits + 1)
        overhang.append(max(0, fits * stride - room))
    return Windows(tuple(count), window, strides, dilation, pads, tuple(overhang))


def sizes_per_axis(name: str, what: str, value: Sizes, x: Any, layout: Layout, least: int = 1) -> tuple[int, ...]:
    """One number for each spatial axis, from one for all or one for each."""
    rank = len(layout.spatial)
    values = value if isinstance(value, tuple) else (value,) * rank
    if len(values) != rank:
        raise ValueError(
            f"{name}: {what} has {_count_axes(len(values))} but the input {x.shape} has "
            f"{_count_axes(rank, 'spatial ')}; pass {what}={((values or (least,)) * rank)[:rank]}."
        )
    if any(type(each) is not int or each < least for each in values):
        raise ValueError(f"{name}: {what} is {value}, but must be whole numbers, {least} or more.")
    return values


def same_padding(size: int, span: int, stride: int) -> tuple[int, int]:
    """The padding that makes windows of that span as many as the places, divided by the stride and rounded up."""
    total = max(0, (-(-size // stride) - 1) * stride + span - size)
    return total // 2, total - total // 2


def resolve_padding(
    name: str, padding: Padding, x: Any, same: list[tuple[int, int]], spans: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """The padding before and after along each spatial axis, from a word or from places."""
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
            raise ValueError(f"{name}: padding is {padding!r}, but must be 'SAME', 'VALID', 'CAUSAL' or places.")
    if len(padding) != len(spans):
        raise ValueError(
            f"{name}: padding has {_count_axes(len(padding))} but the input {x.shape} has "
            f"{_count_axes(len(spans), 'spatial ')}; pass a number or a pair (before, after) for each, "
            f"padding={((1, 1),) * len(spans)} say."
        )
    pads = tuple((pad, pad) if isinstance(pad, int) else pad for pad in padding)
    if any(len(pad) != 2 or min(pad) < 0 for pad in pads):
        raise ValueError(f"{name}: padding is {padding}, but must be places before and after, 0 or more.")
    return pads


def window_slices(x: Array, layout: Layout, where: Windows) -> list[Array]:
    """For each place of a window, in row-major order, that place of every window."""
    pieces = [x]
    for number, axis in enumerate(layout.spatial):
        cut = [axis_window_slices(piece, axis, *where.along(number)) for piece in pieces]
        pieces = list(itertools.chain.from_iterable(cut))
    return pieces


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3, 4, 5))
def axis_window_slices(x: Array, axis: int, count: int, window: int, stride: int, dilation: int) -> list[Array]:
    """The first place of every window along an axis, the second place of every window, and so on to the last."""
    starts = range(0, window * dilation, dilation)
    return [lax.slice_in_dim(x, start, start + (count - 1) * stride + 1, stride, axis) for start in starts]


@axis_window_slices.defjvp
def _axis_window_slices_jvp(axis, count, window, stride, dilation, primals, tangents):
    """The same of the tangent, by other means, for the sake of their transposes.

    That of a strided slice is a spread of zeros, slow on a CPU, and one for each place. Instead the axis is split
    into `stride` interleaved ones, whose transpose is a concatenation, and each place is a plain slice of one.
    """
    (x,), (x_dot,) = primals, tangents
    length = -(-((count - 1) * stride + (window - 1) * dilation + 1) // stride)
    more = length * stride - x.shape[axis]
    x_dot = lax.pad(x_dot, np.zeros((), x.dtype), [(0, more if a == axis else 0, 0) for a in range(x.ndim)])
    apart = x_dot.reshape(*x.shape[:axis], length, stride, *x.shape[axis + 1 :])
    lanes = [lax.squeeze(lane, (axis + 1,)) for lane in lax.split(apart, (1,) * stride, axis + 1)]
    starts = [divmod(place * dilation, stride) for place in range(window)]
    dots = [lax.slice_in_dim(lanes[lane], start, start + count, 1, axis) for start, lane in starts]
    return axis_window_slices(x, axis, count, window, stride, dilation), dots


def _count_axes(count: int, kind: str = "") -> str:
    return f"{count} {kind}{'axis' if count == 1 else 'axes'}"


PadWith = Literal["zeros", "circular", "reflect", "edge"]


def pad(
    x: Float[Array, "..."], axes: tuple[int, ...], widths: tuple[tuple[int, int], ...], pad_with: PadWith = "zeros"
) -> Float[Array, "..."]:
    """`x` with so many more places before and after along each of `axes`, in its dtype.

    They hold zeros; the places at the other end ("circular"); the places as in a mirror that stands on the last
    one, which is not repeated ("reflect"); or the last place, repeated ("edge").
    """
    check_pad("pad", x.shape, axes, widths, pad_with)
    full = [(0, 0)] * x.ndim
    for axis, width in zip(axes, widths, strict=True):
        full[axis] = width
    return jnp.pad(x, full, mode={"zeros": "constant", "circular": "wrap"}.get(pad_with, pad_with))


def check_pad(
    name: str, shape: tuple[Any, ...], axes: tuple[int, ...], widths: tuple[tuple[int, int], ...], pad_with: str
) -> None:
    """Refuse a kind of padding that is none, or that would need more places than the input has."""
    if pad_with not in get_args(PadWith):
        raise ValueError(f"{name}: pad_with is {pad_with!r}, but must be one of {', '.join(get_args(PadWith))}.")
    for axis, width in zip(axes, widths, strict=True):
        most = {"circular": shape[axis], "reflect": shape[axis] - 1}.get(pad_with, max(width))
        if max(width) > most:
            raise ValueError(
                f"{name}: the padding {width} is {pad_with} but axis {axis} of the input {shape} gives {most} places "
                "for it; pad less, or with zeros."
            )
