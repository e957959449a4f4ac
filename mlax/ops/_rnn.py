"""The gates of GRU and LSTM cells."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from mlax._jax import explicit_sharding, fusion_barrier
from mlax.ops._checks import check_same_dtype


def gru(
    ahead: Float[Array, "... g"], product: Float[Array, "... g"], h: Float[Array, "... f"]
) -> Float[Array, "... f"]:
    """The next `h`, the reset gate acting after the product with `h`, in one dtype.

    `ahead` comes from the input and `product` from `h`, each for the gates reset, update and candidate in turn.
    """
    check_same_dtype("gru", ahead=ahead, product=product, h=h)
    return _gru(ahead, product, h)


def blend(
    update: Float[Array, "... f"], old: Float[Array, "... f"], new: Float[Array, "... f"]
) -> Float[Array, "... f"]:
    """`update * old + (1 - update) * new`."""
    return new + update * (old - new)


@jax.custom_jvp
def _gru(ahead: jax.Array, product: jax.Array, h: jax.Array) -> jax.Array:
    _, z, n, _ = _gru_gates(ahead, product)
    return blend(z, h, n)


@_gru.defjvp
def _(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """The chain rule with its factors side by side in one array: five instead of the seven that JAX would store."""
    ahead, product, h = primals
    r, z, n, by_n = _gru_gates(ahead, product)
    slope = (1 - z) * (1 - n * n)
    factors = [slope * by_n * r * (1 - r), (h - n) * z * (1 - z), slope, slope * r, z]
    (dgates, dn), (dgates_too, dby_n) = (jnp.split(change, (2 * h.shape[-1],), -1) for change in tangents[:2])
    changes = [dgates + dgates_too, dn, dby_n, tangents[2]]
    by = lax.concatenate(factors, h.ndim - 1) * lax.concatenate(changes, h.ndim - 1)
    return blend(z, h, n), functools.reduce(lax.add, jnp.split(by, 5, -1))


def _gru_gates(ahead: jax.Array, product: jax.Array) -> tuple[jax.Array, ...]:
    """The gates r and z, the candidate n, and what of the product r acts on."""
    r, z, n = jnp.split(ahead, 3, -1)
    by_r, by_z, by_n = jnp.split(product, 3, -1)
    r = lax.logistic(r + by_r)
    return r, lax.logistic(z + by_z), lax.tanh(n + r * by_n), by_n


CANDIDATE, OUTPUT = 2, 3  # among the gates: input, forget, candidate, output


def lstm(gates: Float[Array, "... g"], c: Float[Array, "... f"]) -> tuple[Float[Array, "... f"], Float[Array, "... f"]]:
    """The next memory and the output, (c, h), from the inputs of the gates and the memory `c` before, in one dtype.

    The gates lie side by side in the order input, forget, candidate, output.
    """
    check_same_dtype("lstm", gates=gates, c=c)
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
    gates = _split_gates(gates)
    i, f, u, o = _unstack_gates(_activate_gates(gates, _gate_index(gates, c)))
    c = f * c + i * u
    return c, o * lax.tanh(c)


@_lstm.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple:
    """The chain rule with its factors in one array: a scan stores few arrays faster than many."""
    gates, before = _split_gates(primals[0]), primals[1]
    place = _gate_index(gates, before)
    opened = _activate_gates(gates, place)
    i, f, u, o = _unstack_gates(opened)
    c = f * before + i * u
    shown = lax.tanh(c)
    # the fence, for backward XLA would compute this in the shape of the gates side by side, several times slower
    by = (
        _gate_derivatives(opened, place)
        * _stack_gates((u, before, i, shown), place)
        * fusion_barrier(_split_gates(tangents[0]))
    )
    is_output = lax.broadcasted_iota(jnp.int32, by.shape, by.ndim - 2, out_sharding=explicit_sharding(by)) == OUTPUT
    dc = f * tangents[1] + _sum_gates(by, ~is_output)
    return (c, o * shown), (dc, o * (1 - shown * shown) * dc + _sum_gates(by, is_output))


def _split_gates(gates: jax.Array) -> jax.Array:
    """The gates one below the other, (..., 4, f)."""
    return gates.reshape(*gates.shape[:-1], 4, gates.shape[-1] // 4)


def _unstack_gates(gates: jax.Array) -> list[jax.Array]:
    return [lax.index_in_dim(gates, place, gates.ndim - 2, keepdims=False) for place in range(4)]


def _stack_gates(each: tuple[jax.Array, ...], place: jax.Array) -> jax.Array:
    """What `_each` takes apart, by choice: XLA on a CPU computes it where it is used, but stores a concatenation."""
    axes = (*range(place.ndim - 2), place.ndim - 1)
    i, f, u, o = (lax.broadcast_in_dim(one, place.shape, axes, out_sharding=explicit_sharding(place)) for one in each)
    return lax.select(place < 2, lax.select(place < 1, i, f), lax.select(place < 3, u, o))


def _gate_index(gates: jax.Array, c: jax.Array) -> jax.Array:
    """Which of the four gates each number belongs to.

    Behind a barrier with what changes at every step; else it would be computed before the loop over time, and so would
    all that follows from it, whole arrays which each step then reads.
    """
    four, _ = lax.optimization_barrier((jnp.arange(4), lax.stop_gradient(c)))
    return lax.broadcast_in_dim(four, gates.shape, (gates.ndim - 2,), out_sharding=explicit_sharding(gates))


def _activate_gates(gates: jax.Array, place: jax.Array) -> jax.Array:
    """How far each gate is open, and the candidate: `logistic(x) = tanh(x / 2) / 2 + 1 / 2`.

    One tanh for all of them, since XLA on a CPU would compute four gates apart again and again.
    """
    scale = _gate_scale(gates, place)
    return scale * lax.tanh(scale * gates) + (1 - scale)


def _gate_derivatives(opened: jax.Array, place: jax.Array) -> jax.Array:
    """The derivative of each gate, `x (1 - x)`, and of the candidate, `1 - x x`, from what they give."""
    scale = _gate_scale(opened, place)
    return lax.square(scale) - lax.square(opened - (1 - scale))


def _gate_scale(gates: jax.Array, place: jax.Array) -> jax.Array:
    return lax.select(place == CANDIDATE, lax.full_like(gates, 1.0), lax.full_like(gates, 0.5))


def _sum_gates(by: jax.Array, which: jax.Array) -> jax.Array:
    chosen = lax.select(which, by, lax.full_like(by, 0.0))
    return lax.reduce(chosen, np.zeros((), by.dtype), lax.add, (by.ndim - 2,))
