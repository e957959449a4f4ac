"""What is computed over all leaves at once."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mlax.core._memory import to_device
from mlax.core._pieces import groups, summed
from mlax.core._wide import widest


def global_norm(leaves: Mapping[str, jax.Array]) -> jax.Array:
    """The root of the sum of all squares, in the widest dtype that occurs, wherever the leaves lie."""
    cut = groups({path: [leaf] for path, leaf in leaves.items()})
    apart = {path for paths, _ in cut for path in paths}
    rest = to_device({path: leaf for path, leaf in leaves.items() if path not in apart})
    total = inner(rest, rest).astype(widest(leaf.dtype for leaf in leaves.values()))
    for paths, number in cut:
        total = summed(lambda piece: inner(piece, piece), {path: leaves[path] for path in paths}, number, total)
    return jnp.sqrt(total)


def inner(a: Mapping[str, jax.Array], b: Mapping[str, jax.Array]) -> jax.Array:
    """The sum of the products, in the widest dtype that occurs, and in no narrower one than float32."""
    wide = widest(leaf.dtype for leaf in a.values())
    total = jnp.zeros((), wide)
    for path, leaf in a.items():
        total = total + jnp.sum(leaf.astype(wide) * b[path].astype(wide))
    return total


def non_finite(leaves: Mapping[str, jax.Array]) -> jax.Array:
    """How many leaves have a number that is not finite."""
    found = jnp.zeros((), jnp.int32)
    for leaf in leaves.values():
        found = found + (~jnp.all(jnp.isfinite(leaf))).astype(jnp.int32)
    return found


def scalar(number: Any, like: jax.Array) -> jax.Array:
    """A number in the dtype of a leaf."""
    return jnp.asarray(number).astype(like.dtype)
