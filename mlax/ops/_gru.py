"""The gates of the gated recurrent unit."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlax.ops._checks import same_dtype


def gru(
    ahead: Float[Array, "... g"], product: Float[Array, "... g"], h: Float[Array, "... f"]
) -> Float[Array, "... f"]:
    """The next `h`, the reset gate acting after the product with `h`, in one dtype.

    `ahead` comes from the input and `product` from `h`, each for the gates reset, update and candidate in turn.
    """
    same_dtype("gru", ahead=ahead, product=product, h=h)
    r, z, n = jnp.split(ahead, 3, -1)
    by_r, by_z, by_n = jnp.split(product, 3, -1)
    n = lax.tanh(n + lax.logistic(r + by_r) * by_n)
    return blend(lax.logistic(z + by_z), h, n)


def blend(
    update: Float[Array, "... f"], old: Float[Array, "... f"], new: Float[Array, "... f"]
) -> Float[Array, "... f"]:
    """`update * old + (1 - update) * new`."""
    return new + update * (old - new)
