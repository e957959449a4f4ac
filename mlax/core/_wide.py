"""The dtypes that sums and small differences are computed in: float32, or a wider one."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp


def wide(dtype: Any) -> Any:
    """The dtype itself, or float32 if it is narrower."""
    return widest([dtype])


def widest(dtypes: Iterable[Any]) -> Any:
    """The widest of float32 and these floating dtypes."""
    return max([jnp.dtype("float32"), *map(jnp.dtype, dtypes)], key=lambda dtype: dtype.itemsize)
