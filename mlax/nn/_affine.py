"""The learned scale and shift that norms end with."""

from typing import Any

import jax

from mlax._jax import named_key
from mlax.core import Tree


def scale_and_shift(layer: Any, rng: jax.Array, shape: tuple[int, ...], dtype: Any) -> Tree:
    """The first values of `scale` and `shift`, each if the layer has it; None if it has neither."""
    trainables = {}
    if layer.scale:
        trainables["scale"] = layer.scale_init(named_key(rng, "scale"), shape, dtype)
    if layer.shift:
        trainables["shift"] = layer.shift_init(named_key(rng, "shift"), shape, dtype)
    return trainables or None
