"""Checks that several operations share."""

from typing import Any

import jax


def is_static(*sizes: Any) -> bool:
    """Whether sizes are numbers; `jax.export` leaves some open, and what goes by their size has to do without."""
    return all(isinstance(size, int) for size in sizes)


def check_same_dtype(operation: str, **arrays: jax.Array | None) -> None:
    """Refuse arrays of two dtypes, by name, where JAX would promote one of them without a word."""
    dtypes = {name: str(array.dtype) for name, array in arrays.items() if array is not None}
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"{operation}: {found}; nothing is cast unasked, so cast them to one dtype.")
