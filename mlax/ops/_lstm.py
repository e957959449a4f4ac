"""The gates of the long short-term memory."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlax.core._laid import split_of
from mlax.ops._checks import same_dtype


def lstm(gates: Float[Array, "... g"], c: Float[Array, "... f"]) -> tuple[Float[Array, "... f"], Float[Array, "... f"]]:
    """The next memory and the output, (c, h), from the inputs of the gates and the memory `c` before, in one dtype.

    The gates lie side by side in the order input, forget, candidate, output.
    """
    same_dtype("lstm", gates=gates, c=c)
    if gates.shape != (*c.shape[:-1], 4 * c.shape[-1]):
        raise ValueError(f"lstm: the gates have the shape {gates.shape}, but must be four times as wide as {c.shape}.")
    return _lstm(gates, c)


def lstm_memory(
    i: Float[Array, "... f"], f: Float[Array, "... f"], u: Float[Array, "... f"], c: Float[Array, "... f"]
) -> Float[Array, "... f"]:
    """The next memory: what the forget gate keeps of `c`, and what the input gate takes of the candidate `u`."""
    return lax.logistic(f) * c + lax.logistic(i) * lax.tanh(u)


def lstm_output(o: Float[Array, "... f"], c: Float[Array, "... f"]) -> Float[Array, "... f"]:
    """What the output gate shows of the memory."""
    return lax.logistic(o) * lax.tanh(c)


@jax.custom_jvp
def _lstm(gates: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    i, f, u, o = jnp.split(_opened(gates), 4, -1)
    c = f * c + i * u
    return c, o * lax.tanh(c)


@_lstm.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple:
    """The chain rule with its factors side by side in one array: a scan stores few arrays faster than many."""
    gates, before = primals
    i, f, u, o = jnp.split(_opened(gates), 4, -1)
    c = f * before + i * u
    shown = lax.tanh(c)
    slopes = [u * i * (1 - i), before * f * (1 - f), i * (1 - u * u), shown * o * (1 - o)]
    by_i, by_f, by_u, by_o = jnp.split(lax.concatenate(slopes, c.ndim - 1) * tangents[0], 4, -1)
    dc = f * tangents[1] + by_i + by_f + by_u
    return (c, o * shown), (dc, o * (1 - shown * shown) * dc + by_o)


def _opened(gates: jax.Array) -> jax.Array:
    """How far each gate is open, and the candidate, the third: `logistic(x) = tanh(x / 2) / 2 + 1 / 2`.

    One tanh for all of them, since XLA on a CPU would compute four gates apart again and again.
    """
    place = lax.broadcasted_iota(jnp.int32, gates.shape, gates.ndim - 1, out_sharding=split_of(gates))
    width = gates.shape[-1] // 4
    candidate = (place >= 2 * width) & (place < 3 * width)
    scale = lax.select(candidate, lax.full_like(gates, 1.0), lax.full_like(gates, 0.5))
    return scale * lax.tanh(scale * gates) + (1 - scale)
