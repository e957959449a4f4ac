"""The leaves of a tree that have a gradient, apart from those that have none."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def split_inexact(tree: Any) -> tuple[list[Any], Callable[..., Any]]:
    """The leaves of floating-point numbers, and a function that puts others in their places.

    The leaves without a gradient, whole numbers and keys, are put back as they were; or as `other`, if that is given.
    """
    leaves, structure = jax.tree.flatten(tree)
    chosen = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def restored(news: list[Any], *other: Any) -> Any:
        new = iter(news)
        rest = [next(new) if is_chosen else (*other, leaf)[0] for leaf, is_chosen in zip(leaves, chosen, strict=True)]
        return structure.unflatten(rest)

    return [leaf for leaf, is_chosen in zip(leaves, chosen, strict=True) if is_chosen], restored
