"""The gates of the long short-term memory."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from mlax._jax import explicit_sharding, fusion_barrier
from mlax.ops._checks import same_dtype

CANDIDATE, OUTPUT = 2, 3  # among the gates: input, forget, candidate, output


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
    gates = _apart(gates)
    i, f, u, o = _each(_opened(gates, _places(gates, c)))
    c = f * c + i * u
    return c, o * lax.tanh(c)


@_lstm.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple:
    """The chain rule with its factors in one array: a scan stores few arrays faster than many."""
    gates, before = _apart(primals[0]), primals[1]
    place = _places(gates, before)
    opened = _opened(gates, place)
    i, f, u, o = _each(opened)
    c = f * before + i * u
    shown = lax.tanh(c)
    # the fence, for backward XLA would compute this in the shape of the gates side by side, several times slower
    by = _slope(opened, place) * _stacked((u, before, i, shown), place) * fusion_barrier(_apart(tangents[0]))
    is_output = lax.broadcasted_iota(jnp.int32, by.shape, by.ndim - 2, out_sharding=explicit_sharding(by)) == OUTPUT
    dc = f * tangents[1] + _sum(by, ~is_output)
    return (c, o * shown), (dc, o * (1 - shown * shown) * dc + _sum(by, is_output))


def _apart(gates: jax.Array) -> jax.Array:
    """The gates one below the other, (..., 4, f)."""
    return gates.reshape(*gates.shape[:-1], 4, gates.shape[-1] // 4)


def _each(gates: jax.Array) -> list[jax.Array]:
    return [lax.index_in_dim(gates, place, gates.ndim - 2, keepdims=False) for place in range(4)]


def _stacked(each: tuple[jax.Array, ...], place: jax.Array) -> jax.Array:
    """What `_each` takes apart, by choice: XLA on a CPU computes it where it is used, but stores a concatenation."""
    axes = (*range(place.ndim - 2), place.ndim - 1)
    i, f, u, o = (lax.broadcast_in_dim(one, place.shape, axes, out_sharding=explicit_sharding(place)) for one in each)
    return lax.select(place < 2, lax.select(place < 1, i, f), lax.select(place < 3, u, o))


def _places(gates: jax.Array, c: jax.Array) -> jax.Array:
    """Which of the four gates each number belongs to.

    Behind a barrier with what changes at every step; else it would be computed before the loop over time, and so would
    all that follows from it, whole arrays which each step then reads.
    """
    four, _ = lax.optimization_barrier((jnp.arange(4), lax.stop_gradient(c)))
    return lax.broadcast_in_dim(four, gates.shape, (gates.ndim - 2,), out_sharding=explicit_sharding(gates))


def _opened(gates: jax.Array, place: jax.Array) -> jax.Array:
    """How far each gate is open, and the candidate: `logistic(x) = tanh(x / 2) / 2 + 1 / 2`.

    One tanh for all of them, since XLA on a CPU would compute four gates apart again and again.
    """
    scale = _scale(gates, place)
    return scale * lax.tanh(scale * gates) + (1 - scale)


def _slope(opened: jax.Array, place: jax.Array) -> jax.Array:
    """The derivative of each gate, `x (1 - x)`, and of the candidate, `1 - x x`, from what they give."""
    scale = _scale(opened, place)
    return lax.square(scale) - lax.square(opened - (1 - scale))


def _scale(gates: jax.Array, place: jax.Array) -> jax.Array:
    return lax.select(place == CANDIDATE, lax.full_like(gates, 1.0), lax.full_like(gates, 0.5))


def _sum(by: jax.Array, which: jax.Array) -> jax.Array:
    chosen = lax.select(which, by, lax.full_like(by, 0.0))
    return lax.reduce(chosen, np.zeros((), by.dtype), lax.add, (by.ndim - 2,))
