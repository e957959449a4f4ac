"""Checks that several operations share."""

import jax


def same_dtype(operation: str, **arrays: jax.Array | None) -> None:
    """Refuse arrays of two dtypes, by name, where JAX would promote one of them without a word."""
    dtypes = {name: str(array.dtype) for name, array in arrays.items() if array is not None}
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"{operation}: {found}; nothing is cast unasked, so cast them to one dtype.")
