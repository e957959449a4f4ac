"""Products with the rows of a table: an embedding read the other way round."""

from typing import Any

from jax import lax
from jaxtyping import Array, Float

from mlax.ops._checks import same_dtype


def attend(
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
    same_dtype("attend", x=x, table=table)
    y = lax.dot_general(
        x, table, (((x.ndim - 1,), (1,)), ((), ())), precision=precision, preferred_element_type=accum_dtype
    )
    return lax.convert_element_type(y, x.dtype)
