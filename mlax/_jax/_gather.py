"""Rows of a table whose gradient keeps the precision of float16 and bfloat16."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax._jax._reductions import sums_precisely
from mlax._jax._sharding import is_unsharded_cpu

Mode = Literal["fill", "clip"]


def take_rows(table: jax.Array, indices: jax.Array, mode: Mode) -> jax.Array:
    """`table[indices]`; an index beyond the last row gives NaN ("fill") or the nearest row ("clip").

    JAX's gradient adds the rows of each index one after the other. Where that is rounded to a narrow dtype each time,
    they are sorted and added in pairs, and pairs of pairs.
    """
    is_static = all(isinstance(size, int) for size in indices.shape)
    if not is_static or 0 in (*indices.shape, *table.shape):
        return jnp.take(table, indices, axis=0, mode=mode)
    if not sums_precisely(table):
        return _take_rows(table, indices, mode)
    if is_unsharded_cpu(table) and is_unsharded_cpu(indices):
        return _take_slices(table, indices, mode)
    return jnp.take(table, indices, axis=0, mode=mode)


def narrow_indices(indices: jax.Array, size: Any) -> jax.Array:
    """Indices of at most 32 bits, all that XLA reads; of 64-bit ones, those out of bounds become -1 or `size`."""
    if indices.dtype.itemsize < 8:
        return indices
    lowest = -1 if jnp.issubdtype(indices.dtype, jnp.signedinteger) else 0
    return jnp.clip(indices, lowest, size).astype(jnp.int32)


def _take_slices(table: jax.Array, indices: jax.Array, mode: Mode) -> jax.Array:
    """`jnp.take` as XLA rewrites it on a CPU: slices (n, 1, d) for indices (n, 1).

    Its own rewriting copies the cotangents before it adds them to the table's gradient (benchmarks/layers.py, Embed).
    """
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, table.ndim + 1)), collapsed_slice_dims=(), start_index_map=(0,)
    )
    slices = lax.gather(table, indices.reshape(-1, 1), dimensions, (1, *table.shape[1:]), mode=mode)
    return slices.reshape(*indices.shape, *table.shape[1:])


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _take_rows(table: jax.Array, indices: jax.Array, mode: Mode) -> jax.Array:
    return jnp.take(table, indices, axis=0, mode=mode)


@_take_rows.defjvp
def _(mode: Mode, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """The tangent takes each row once and copies it to the others of its index: the transpose of a sum in pairs."""
    (table, indices), (dot, _) = primals, tangents
    rows = table.shape[0]
    wide = indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)  # to hold the number of rows
    flat = jnp.clip(wide.reshape(-1), 0, rows - 1 if mode == "clip" else rows)
    order = jnp.argsort(flat)
    ordered = flat[order]
    changes = ordered[1:] != ordered[:-1]
    is_first, is_last = (jnp.concatenate(pair) for pair in ((np.ones(1, bool), changes), (changes, np.ones(1, bool))))

    def sum_by_index(values: jax.Array) -> jax.Array:
        """At the last of each run of equal indices, the sum of its values."""
        return lax.associative_scan(_add_unless_first, (is_first, values))[1]

    once = jnp.take(dot, jnp.where(is_last, ordered, rows), axis=0, mode="fill", fill_value=0)
    (copies,) = jax.linear_transpose(sum_by_index, once)(once)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    taken = copies.at[back].get(unique_indices=True, mode="promise_in_bounds")
    return _take_rows(table, indices, mode), taken.reshape(*indices.shape, *table.shape[1:])


def _add_unless_first(before: Any, after: Any) -> Any:
    is_first = lax.expand_dims(after[0], range(1, after[1].ndim))
    return before[0] | after[0], jnp.where(is_first, after[1], before[1] + after[1])
