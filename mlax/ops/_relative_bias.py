"""Relative bias: a number for each head and each bucket of distances."""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from mlax.ops._rows import rows


def relative_bias(
    queries: Integer[Array, "b t"],
    keys: Integer[Array, "b s"],
    table: Float[Array, "n h"],
    *,
    bidirectional: bool = True,
    farthest: int = 128,
) -> Float[Array, "b h t s"]:
    """The row of `table` for the bucket of each distance between positions, heads first, in the table's dtype."""
    offsets = keys[:, None, :] - queries[:, :, None]  # (b, t, s), how far the key is ahead
    buckets = relative_buckets(offsets, table.shape[0], bidirectional=bidirectional, farthest=farthest)
    return jnp.moveaxis(rows(table, buckets, mode="clip"), -1, 1)


def relative_buckets(
    offsets: Integer[Array, "*t"], buckets: int, *, bidirectional: bool = True, farthest: int = 128
) -> Integer[Array, "*t"]:
    """The bucket, from 0 to `buckets` - 1, of each key's offset from its query.

    Half of the buckets are for one distance each, the rest for ever wider ranges up to `farthest`, and the last for
    all beyond. Keys ahead have buckets of their own where `bidirectional`, or else count as distance 0.
    https://arxiv.org/abs/1910.10683, section 2.1; the rounding is that of its authors' code.
    """
    if buckets < (4 if bidirectional else 2) or (bidirectional and buckets % 2):
        raise ValueError(f"relative_buckets: there are {buckets} buckets, but an even number of at least 4 is needed.")
    sided = buckets // 2 if bidirectional else buckets
    distance = jnp.abs(offsets) if bidirectional else jnp.maximum(-offsets, 0)
    found = rows(jnp.asarray(_by_distance(sided, farthest)), distance, mode="clip")
    return jnp.where(offsets > 0, found + sided, found) if bidirectional else found


@functools.lru_cache(maxsize=64)
def _by_distance(buckets: int, farthest: int) -> np.ndarray:
    """The bucket of each distance from 0 to `farthest`."""
    exact = buckets // 2
    if farthest <= exact:
        raise ValueError(f"relative_buckets: farthest is {farthest}, but must be above {exact}, the exact distances.")
    distance = np.arange(farthest + 1)
    # in float32, as the models that were trained with these buckets computed them
    share = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        np.log(farthest / exact)
    )
    wide = exact + (share * np.float32(buckets - exact)).astype(np.int32)
    return np.where(distance < exact, distance, np.minimum(wide, buckets - 1)).astype(np.int32)
