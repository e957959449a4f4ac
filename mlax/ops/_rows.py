"""Reading a table."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from mlax.core._laid import split_of


def rows(table: jax.Array, indices: jax.Array, **beyond: Any) -> jax.Array:
    """`table[indices]`, over an explicit mesh split as the indices are; `beyond` says what is beyond the last row."""
    split = split_of(indices)
    if split is not None:
        split = NamedSharding(split.mesh, PartitionSpec(*split.spec, *jax.typeof(table).sharding.spec[1:]))
    return table.at[indices].get(out_sharding=split, **beyond)
