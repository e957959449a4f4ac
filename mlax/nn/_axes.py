"""Shapes of variables that lie along some axes of the input."""

from typing import Any


def shape_over(layer: Any, x: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that broadcasts against `x` and has its sizes along `axes` and 1 elsewhere, leading 1s cut off.

    Negative axes only: they count from the end, so the batch axis never becomes part of a variable.
    """
    if not axes or any(axis >= 0 for axis in axes) or len(set(axes)) < len(axes):
        raise ValueError(f"{layer}: axes is {axes}, but must be distinct negative numbers, counted from the end.")
    if -min(axes) > x.ndim:
        raise ValueError(f"{layer}: the input has the shape {x.shape}, which has no axis {min(axes)}.")
    return tuple(x.shape[axis] if axis in axes else 1 for axis in range(min(axes), 0))
