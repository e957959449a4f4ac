"""Rows of a table."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from mlax.ops._rows import rows


def embed(x: Integer[Array, "..."], table: Float[Array, "v d"]) -> Float[Array, "... d"]:
    """The row of `table` for each entry of `x`, in the dtype of the table.

    An entry outside of the table gives NaN, forward, and no gradient: a mistake that shows.
    """
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"embed: the input is {x.dtype}, but must be whole numbers; cast it to int32.")
    return rows(table, x, mode="fill")
