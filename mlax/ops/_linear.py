"""Products with a kernel or an embedding table over the last axis, and embedding lookups."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Integer

from mlax._jax import broadcast_like, expand_last, explicit_sharding, narrow_indices, reduce_sum, take_rows
from mlax.core import check_is_dtype
from mlax.ops._activations import activate
from mlax.ops._checks import check_same_dtype
from mlax.ops._cpu import flatten_rows


def linear(
    x: Float[Array, "... d"],
    kernel: Float[Array, "d f"],
    bias: Float[Array, " f"] | None = None,
    *,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    precision: lax.PrecisionLike = None,
    accum_dtype: Any = None,
) -> Float[Array, "... f"]:
    """A linear map: `activation(x @ kernel + bias)`, in the dtype of `x`.

    Products are summed in `accum_dtype` if given. On a GPU, the bias and `ops.gelu` or `ops.exact_gelu` are one pass.
    """
    check_is_dtype("linear", accum_dtype=accum_dtype)
    if x.ndim == 0 or x.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"linear: the input has the shape {x.shape} but the kernel {kernel.shape}; "
            "the last axis of the input must have the size of the first of the kernel."
        )
    check_same_dtype("linear", x=x, kernel=kernel, bias=bias)
    y = _dot(flatten_rows(x), kernel, 0, precision, accum_dtype).reshape(*x.shape[:-1], kernel.shape[1])
    bias = None if bias is None else lax.convert_element_type(bias, y.dtype)
    if activation is not None:
        y = activate(y, bias, activation)
    elif bias is not None:
        y = y + expand_last(bias, y)
    return lax.convert_element_type(y, x.dtype)


def tied_logits(
    x: Float[Array, "... d"],
    table: Float[Array, "v d"],
    *,
    precision: lax.PrecisionLike = None,
    accum_dtype: Any = None,
) -> Float[Array, "... v"]:
    """`x @ table.T`, the logits of an output layer tied to an embedding table, in the dtype of `x`.

    Products are summed in `accum_dtype` if given. https://arxiv.org/abs/1608.05859
    """
    check_is_dtype("tied_logits", accum_dtype=accum_dtype)
    if x.ndim == 0 or x.shape[-1] != table.shape[1]:
        raise ValueError(
            f"tied_logits: the input has the shape {x.shape} but the table {table.shape}; their last axes must be of "
            "equal size."
        )
    check_same_dtype("tied_logits", x=x, table=table)
    return lax.convert_element_type(_dot(x, table, 1, precision, accum_dtype), x.dtype)


def embedding(
    x: Integer[Array, "..."], table: Float[Array, "v d"], *, padding: int | None = None
) -> Float[Array, "... d"]:
    """Embedding lookup: the row of `table` for each index in `x`, in the dtype of the table.

    An index out of bounds gives NaN, and no gradient, so that the mistake shows; `padding` gives no gradient either.
    """
    _check_indices("embedding", x)
    rows = gather_rows(table, x, mode="fill")
    return rows if padding is None else jnp.where((x == padding)[..., None], lax.stop_gradient(rows), rows)


def embedding_bag(
    x: Integer[Array, "... n"],
    table: Float[Array, "v d"],
    weights: Float[Array, "... n"] | Bool[Array, "... n"] | None = None,
    *,
    by: Literal["sum", "mean", "max"] = "mean",
    padding: int | None = None,
) -> Float[Array, "... d"]:
    """A bag of embeddings: the sum, mean or maximum of the rows of `table` for the indices along the last axis of `x`.

    `weights` are booleans that say which indices count, or, for the sum, numbers to multiply the rows with. `padding`
    does not count. Where none counts the result is 0.
    """
    _check_indices("embedding_bag", x)
    rows = gather_rows(table, x, mode="fill")  # (..., n, d)
    counts = jnp.ones(x.shape, bool) if padding is None else x != padding
    if weights is not None and jnp.issubdtype(weights.dtype, jnp.bool_):
        counts = counts & weights
    elif weights is not None:
        if by != "sum":
            raise ValueError(f"embedding_bag: the weights are {weights.dtype}, but a {by} takes booleans only.")
        check_same_dtype("embedding_bag", table=table, weights=weights)
        rows = rows * broadcast_like(weights[..., None], rows)
    counts, axis = counts[..., None], (x.ndim - 1,)
    if by == "max":
        lowest = jnp.where(counts, rows, jnp.full_like(rows, -jnp.inf))
        highest = lowest.max(axis=axis, initial=-jnp.inf)
        return jnp.where(counts.any(axis=axis), highest, jnp.zeros_like(highest))
    total = reduce_sum(jnp.where(counts, rows, jnp.zeros_like(rows)), axis)
    if by == "sum":
        return total
    number = jnp.maximum(lax.convert_element_type(counts.sum(axis=axis, dtype=jnp.int32), total.dtype), 1.0)
    return total / broadcast_like(number, total)


def _check_indices(name: str, x: Any) -> None:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}: the input is {x.dtype}, but must be integers; cast it to int32.")


@functools.partial(jax.jit, static_argnames="mode")
def gather_rows(table: jax.Array, indices: jax.Array, mode: Literal["fill", "clip"]) -> jax.Array:
    """`table[indices]`, over explicit mesh axes sharded like the indices.

    An index out of bounds gives NaN ("fill") or the nearest row ("clip"). Negative indices are out of bounds.
    """
    indices = narrow_indices(indices, table.shape[0])
    if mode == "fill" and jnp.issubdtype(indices.dtype, jnp.signedinteger):
        # without a sign, negative ones lie beyond the last row, and JAX adds no code that counts them from the end
        indices = indices.astype(jnp.int32).astype(jnp.uint32)
    sharding = explicit_sharding(indices)
    if sharding is None:
        return take_rows(table, indices, mode)
    spec = PartitionSpec(*sharding.spec, *jax.typeof(table).sharding.spec[1:])
    return table.at[indices].get(mode=mode, out_sharding=NamedSharding(sharding.mesh, spec))


def _dot(x: Array, kernel: Array, axis: int, precision: lax.PrecisionLike, accum_dtype: Any) -> Array:
    """The product of the last axis of `x` with one axis of the kernel, in `accum_dtype` if given."""
    dimensions = (((x.ndim - 1,), (axis,)), ((), ()))
    return lax.dot_general(x, kernel, dimensions, precision=precision, preferred_element_type=accum_dtype)
