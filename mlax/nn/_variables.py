"""Shapes and dtypes of a layer's variables."""

from typing import Any

import jax.numpy as jnp

from mlax.core import flatten_paths, short_repr


def broadcast_shape(layer: Any, x: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that broadcasts against `x` and has its sizes along `axes` and 1 elsewhere, leading 1s cut off.

    Negative axes only: they count from the end, so the batch axis never becomes part of a variable.
    """
    if not axes or any(axis >= 0 for axis in axes) or len(set(axes)) < len(axes):
        raise ValueError(f"{layer}: axes is {axes}, but must be distinct negative numbers, counted from the end.")
    if -min(axes) > x.ndim:
        raise ValueError(f"{layer}: the input has the shape {x.shape}, which has no axis {min(axes)}.")
    return tuple(x.shape[axis] if axis in axes else 1 for axis in range(min(axes), 0))


def num_channels(layer: Any, x: Any) -> int:
    """How many channels `x` has along the layer's `axis`, which may be any but the batch axis."""
    if not -x.ndim <= layer.axis < x.ndim:
        raise ValueError(f"{layer}: the input has the shape {x.shape}, which has no axis {layer.axis}.")
    if layer.axis % x.ndim == 0:
        raise ValueError(
            f"{layer}: axis {layer.axis} of the input {x.shape} is its batch axis, which holds no channels; "
            "pass the axis of the channels, or add a batch axis in front."
        )
    return x.shape[layer.axis]


def check_state_dtype(layer: Any, state: Any, dtype: Any) -> None:
    """Refuse state of another dtype than the one that the layer computes it in: nothing is cast unasked."""
    for path, leaf in flatten_paths(state).items():
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != dtype:
            raise TypeError(
                f"{short_repr(layer)}: {path} is {leaf.dtype} but is computed in {dtype}, and nothing is cast unasked; "
                f"pass accum_dtype={str(leaf.dtype)!r} (mlax.dtypes.mixed_bfloat16 does), or cast the state."
            )
