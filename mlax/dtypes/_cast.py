"""cast: a tree of arrays in another floating dtype."""

from typing import Any

import jax
import jax.numpy as jnp

from mlax.core import DType


def cast(tree: Any, dtype: DType) -> Any:
    """The same tree with every floating leaf in `dtype`; integers, booleans and keys stay. None changes nothing.

    Leaves may be arrays or `jax.ShapeDtypeStruct`.
    """
    if dtype is None:
        return tree
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"cast: {dtype} is no floating dtype, and rounding weights to whole numbers is never meant.")

    def converted(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype))
        return leaf.astype(dtype)

    return jax.tree.map(converted, tree)
