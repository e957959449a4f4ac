"""What is known while tracing: sizes that are integers, and arrays that have values."""

from typing import Any

import numpy as np
from jax.core import Tracer


def is_static(*sizes: Any) -> bool:
    """Whether all sizes are integers; False for symbolic dimensions (`jax.export`)."""
    return all(isinstance(size, int) for size in sizes)


def known_values(x: Any) -> np.ndarray | None:
    """The values of an array; None while it is traced or abstract, or where other processes hold part of it."""
    if isinstance(x, Tracer) or not hasattr(x, "__array__") or not getattr(x, "is_fully_addressable", True):
        return None
    return np.asarray(x)
