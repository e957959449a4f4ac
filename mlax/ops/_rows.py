"""Reading a table."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from mlax._jax import explicit_sharding


@functools.partial(jax.jit, static_argnames="mode")
def rows(table: jax.Array, indices: jax.Array, mode: Literal["fill", "clip"]) -> jax.Array:
    """`table[indices]`, over an explicit mesh split as the indices are.

    Outside of the table there is NaN ("fill"), or the nearest row ("clip"); no number counts from the end.
    """
    if mode == "fill" and jnp.issubdtype(indices.dtype, jnp.signedinteger):
        wide = indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)  # to hold the number of rows
        indices = jnp.where(wide < 0, table.shape[0], wide)
    split = explicit_sharding(indices)
    if split is None:
        return jnp.take(table, indices, axis=0, mode=mode)
    split = NamedSharding(split.mesh, PartitionSpec(*split.spec, *jax.typeof(table).sharding.spec[1:]))
    return table.at[indices].get(mode=mode, out_sharding=split)
