"""Products with a kernel or an embedding table over the last axis, and table lookups."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Integer

from mlax._jax import explicit_sharding
from mlax.ops._checks import check_same_dtype


def linear(
    x: Float[Array, "... d"],
    kernel: Float[Array, "d f"],
    bias: Float[Array, " f"] | None = None,
    *,
    precision: jax.lax.PrecisionLike = None,
    accum_dtype: Any = None,
) -> Float[Array, "... f"]:
    """`x @ kernel + bias`, in the dtype of `x`; the sum of products runs in `accum_dtype` if one is given."""
    if x.ndim == 0 or x.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"linear: the input has the shape {x.shape} but the kernel {kernel.shape}; "
            "the last axis of the input must be as long as the first of the kernel."
        )
    check_same_dtype("linear", x=x, kernel=kernel, bias=bias)
    rows = x.reshape(-1, x.shape[-1]) if _flatten(x) else x
    y = lax.dot_general(
        rows, kernel, (((rows.ndim - 1,), (0,)), ((), ())), precision=precision, preferred_element_type=accum_dtype
    ).reshape(*x.shape[:-1], kernel.shape[1])
    if bias is not None:
        y = y + lax.convert_element_type(bias, y.dtype)
    return lax.convert_element_type(y, x.dtype)


def _flatten(x: jax.Array) -> bool:
    """Whether to multiply over two axes instead of all: on a CPU, where no axis but the first may be sharded.

    XLA's CPU compiler is faster so (benchmarks/linear.py), and the others are not. A sharded axis that is merged with
    the one before it would have to be gathered, or change its sharding; over a mesh in auto mode nobody knows which
    are. The device is read here and not by `lax.platform_dependent`, which would put both products, and the gradients
    of both, into every jaxpr.
    """
    if x.ndim < 3 or x.size == 0 or jax.default_backend() != "cpu":
        return False
    sharding = jax.typeof(x).sharding
    return not sharding.mesh.auto_axes and not any(sharding.spec[1:-1])


def tied_logits(
    x: Float[Array, "... d"],
    table: Float[Array, "v d"],
    *,
    precision: lax.PrecisionLike = None,
    accum_dtype: Any = None,
) -> Float[Array, "... v"]:
    """`x @ table.T`: how well `x` fits each row of an embedding table, in the dtype of `x`.

    The sum of products runs in `accum_dtype` if one is given. https://arxiv.org/abs/1608.05859
    """
    if x.ndim == 0 or x.shape[-1] != table.shape[1]:
        raise ValueError(
            f"attend: the input has the shape {x.shape} but the table {table.shape}; widths must be equal."
        )
    check_same_dtype("attend", x=x, table=table)
    y = lax.dot_general(
        x, table, (((x.ndim - 1,), (1,)), ((), ())), precision=precision, preferred_element_type=accum_dtype
    )
    return lax.convert_element_type(y, x.dtype)


def embedding(x: Integer[Array, "..."], table: Float[Array, "v d"]) -> Float[Array, "... d"]:
    """The row of `table` for each entry of `x`, in the dtype of the table.

    An entry outside of the table gives NaN, forward, and no gradient: a mistake that shows.
    """
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"embed: the input is {x.dtype}, but must be whole numbers; cast it to int32.")
    return gather_rows(table, x, mode="fill")


@functools.partial(jax.jit, static_argnames="mode")
def gather_rows(table: jax.Array, indices: jax.Array, mode: Literal["fill", "clip"]) -> jax.Array:
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
