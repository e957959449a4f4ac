"""The gated linear unit."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from mlax.ops._checks import same_dtype


def glu(
    gate: Float[Array, "..."], value: Float[Array, "..."], activation: Callable[[jax.Array], jax.Array]
) -> Float[Array, "..."]:
    """`activation(gate) * value`, in the dtype of both. https://arxiv.org/abs/2002.05202, equations 4 and 5."""
    same_dtype("glu", gate=gate, value=value)
    return activation(gate) * value
