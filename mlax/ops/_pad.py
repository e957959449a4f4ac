"""Padding of spatial axes: by zeros, by the other end, by the mirror image, by the edge."""

from typing import Any, Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float

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
