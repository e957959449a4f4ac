"""The channel axis of an input."""

from typing import Any


def channels(layer: Any, x: Any) -> int:
    """How many channels `x` has along the layer's `axis`, which may be any but the batch axis."""
    if not -x.ndim <= layer.axis < x.ndim:
        raise ValueError(f"{layer}: the input has the shape {x.shape}, which has no axis {layer.axis}.")
    if layer.axis % x.ndim == 0:
        raise ValueError(
            f"{layer}: axis {layer.axis} of the input {x.shape} is its batch axis, which holds no channels; "
            "pass the axis of the channels, or add a batch axis in front."
        )
    return x.shape[layer.axis]
