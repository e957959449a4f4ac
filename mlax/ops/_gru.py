"""The gates of the gated recurrent unit."""

import functools

import jax
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
    return _gru(ahead, product, h)


def blend(
    update: Float[Array, "... f"], old: Float[Array, "... f"], new: Float[Array, "... f"]
) -> Float[Array, "... f"]:
    """`update * old + (1 - update) * new`."""
    return new + update * (old - new)


@jax.custom_jvp
def _gru(ahead: jax.Array, product: jax.Array, h: jax.Array) -> jax.Array:
    _, z, n, _ = _opened(ahead, product)
    return blend(z, h, n)


@_gru.defjvp
def _(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """The chain rule with its factors side by side in one array: five instead of the seven that JAX would store."""
    ahead, product, h = primals
    r, z, n, by_n = _opened(ahead, product)
    slope = (1 - z) * (1 - n * n)
    factors = [slope * by_n * r * (1 - r), (h - n) * z * (1 - z), slope, slope * r, z]
    (dgates, dn), (dgates_too, dby_n) = (jnp.split(change, (2 * h.shape[-1],), -1) for change in tangents[:2])
    changes = [dgates + dgates_too, dn, dby_n, tangents[2]]
    by = lax.concatenate(factors, h.ndim - 1) * lax.concatenate(changes, h.ndim - 1)
    return blend(z, h, n), functools.reduce(lax.add, jnp.split(by, 5, -1))


def _opened(ahead: jax.Array, product: jax.Array) -> tuple[jax.Array, ...]:
    """The gates r and z, the candidate n, and what of the product r acts on."""
    r, z, n = jnp.split(ahead, 3, -1)
    by_r, by_z, by_n = jnp.split(product, 3, -1)
    r = lax.logistic(r + by_r)
    return r, lax.logistic(z + by_z), lax.tanh(n + r * by_n), by_n
