"""Shapes and dtypes of variables that several layers share."""

from typing import Any

import jax
import jax.numpy as jnp

from mlax.core import flatten_paths, short_repr


def broadcast_shape(layer: Any, x: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a variable that broadcasts against `x`: its sizes along `axes`, 1 elsewhere, without leading 1s.

    Axes must be negative, so that they count from the end and the batch axis is never among them.
    """
    if not axes or any(axis >= 0 for axis in axes) or len(set(axes)) < len(axes):
        raise ValueError(f"{layer}: axes is {axes}, but must be distinct negative integers, counted from the end.")
    if -min(axes) > x.ndim:
        raise ValueError(f"{layer}: the input has the shape {x.shape}, which has no axis {min(axes)}.")
    return tuple(x.shape[axis] if axis in axes else 1 for axis in range(min(axes), 0))


def num_channels(layer: Any, x: Any) -> int:
    """The size of `x` along the layer's `axis`, which may be any but the batch axis."""
    if not -x.ndim <= layer.axis < x.ndim:
        raise ValueError(f"{layer}: the input has the shape {x.shape}, which has no axis {layer.axis}.")
    if layer.axis % x.ndim == 0:
        raise ValueError(
            f"{layer}: axis {layer.axis} of the input {x.shape} is the batch axis, not the channels; pass the axis of "
            "the channels, or add a batch axis in front."
        )
    return x.shape[layer.axis]


def has_shapes(variables: Any, shapes: Any, dtype: Any) -> bool:
    """Whether variables, which nothing has checked yet, are arrays of these shapes by name, all of one dtype."""
    found = jax.tree.map(lambda leaf: (getattr(leaf, "shape", None), getattr(leaf, "dtype", None)), variables)
    return found == jax.tree.map(lambda shape: (shape, dtype), shapes, is_leaf=lambda each: isinstance(each, tuple))


def check_state_dtype(layer: Any, state: Any, dtype: Any) -> None:
    """Raise if the state has another dtype than the layer computes it in: mlax never casts implicitly."""
    for path, leaf in flatten_paths(state).items():
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != dtype:
            raise TypeError(
                f"{short_repr(layer)}: {path} is {leaf.dtype} but is computed in {dtype}, and mlax never casts "
                f"implicitly; pass accum_dtype={str(leaf.dtype)!r} (as mlax.dtypes.mixed_bfloat16 does), or cast the "
                "state."
            )
