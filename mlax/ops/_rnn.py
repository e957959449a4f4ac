"""The gates of GRU and LSTM cells, with derivatives that a scan over time stores and computes in few arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from mlax._jax import explicit_sharding, fusion_barrier
from mlax.ops._checks import check_same_dtype

CANDIDATE, OUTPUT = 2, 3  # among an LSTM's gates: input, forget, candidate, output


def gru(
    ahead: Float[Array, "... g"], product: Float[Array, "... g"], h: Float[Array, "... f"]
) -> Float[Array, "... f"]:
    """A GRU step: the next `h` of a GRU whose reset gate acts after the product with `h`, in one dtype.

    `ahead` comes from the input and `product` from `h`, each the reset, update and candidate gates concatenated.
    """
    check_same_dtype("gru", ahead=ahead, product=product, h=h)
    return _gru(ahead, product, h)


def blend(
    update: Float[Array, "... f"], old: Float[Array, "... f"], new: Float[Array, "... f"]
) -> Float[Array, "... f"]:
    """`update * old + (1 - update) * new`."""
    return new + update * (old - new)


def lstm(gates: Float[Array, "... g"], c: Float[Array, "... f"]) -> tuple[Float[Array, "... f"], Float[Array, "... f"]]:
    """An LSTM step, `c' = f c + i u` and `h = o tanh(c')`: the next cell state and the output, (c, h), in one dtype.

    `gates` are the input, forget, candidate and output gates before their activations, concatenated.
    """
    check_same_dtype("lstm", gates=gates, c=c)
    if gates.shape != (*c.shape[:-1], 4 * c.shape[-1]):
        raise ValueError(f"lstm: the gates have the shape {gates.shape}, but must be four times as wide as {c.shape}.")
    return _lstm(gates, c)


def lstm_memory(
    i: Float[Array, "... f"], f: Float[Array, "... f"], u: Float[Array, "... f"], c: Float[Array, "... f"]
) -> Float[Array, "... f"]:
    """The next cell state, from the input gate, the forget gate and the candidate before their activations."""
    return lax.logistic(f) * c + lax.logistic(i) * lax.tanh(u)


def lstm_output(o: Float[Array, "... f"], c: Float[Array, "... f"]) -> Float[Array, "... f"]:
    """The output, from the output gate before its activation and the new cell state."""
    return lax.logistic(o) * lax.tanh(c)


@jax.custom_jvp
def _gru(ahead: jax.Array, product: jax.Array, h: jax.Array) -> jax.Array:
    _, z, n, _ = _gru_gates(ahead, product)
    return blend(z, h, n)


@_gru.defjvp
def _(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """The chain rule with its factors concatenated: five residuals instead of the seven that JAX would store."""
    ahead, product, h = primals
    r, z, n, n_product = _gru_gates(ahead, product)
    slope = (1 - z) * (1 - n * n)
    factors = [slope * n_product * r * (1 - r), (h - n) * z * (1 - z), slope, slope * r, z]
    (dgates, dn), (dgates_product, dn_product) = (jnp.split(dot, (2 * h.shape[-1],), -1) for dot in tangents[:2])
    dots = [dgates + dgates_product, dn, dn_product, tangents[2]]
    terms = lax.concatenate(factors, h.ndim - 1) * lax.concatenate(dots, h.ndim - 1)
    return blend(z, h, n), functools.reduce(lax.add, jnp.split(terms, 5, -1))


def _gru_gates(ahead: jax.Array, product: jax.Array) -> tuple[jax.Array, ...]:
    """The reset and update gates r and z, the candidate n, and the part of the product that r multiplies."""
    r, z, n = jnp.split(ahead, 3, -1)
    r_product, z_product, n_product = jnp.split(product, 3, -1)
    r = lax.logistic(r + r_product)
    return r, lax.logistic(z + z_product), lax.tanh(n + r * n_product), n_product


@jax.custom_jvp
def _lstm(gates: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    gates = _split_gates(gates)
    i, f, u, o = _unstack_gates(_activate_gates(gates, _gate_index(gates, c)))
    c = f * c + i * u
    return c, o * lax.tanh(c)


@_lstm.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple:
    """The chain rule for all four gates in one array, (..., 4, f): fewer residuals, and one loop over them.

    With concatenated factors a training step takes 4% longer on an H200, and up to 8% on a CPU.
    """
    gates, before = _split_gates(primals[0]), primals[1]
    index = _gate_index(gates, before)
    active = _activate_gates(gates, index)
    i, f, u, o = _unstack_gates(active)
    c = f * before + i * u
    tanh_c = lax.tanh(c)
    # without the barrier XLA computes the backward pass in the shape of concatenated gates, several times slower
    dgates = fusion_barrier(_split_gates(tangents[0]))
    terms = _gate_derivatives(active, index) * _stack_gates((u, before, i, tanh_c), index) * dgates
    is_output = lax.broadcasted_iota(jnp.int32, terms.shape, terms.ndim - 2, out_sharding=explicit_sharding(terms))
    is_output = is_output == OUTPUT
    dc = f * tangents[1] + _sum_gates(terms, ~is_output)
    return (c, o * tanh_c), (dc, o * (1 - tanh_c * tanh_c) * dc + _sum_gates(terms, is_output))


def _split_gates(gates: jax.Array) -> jax.Array:
    """Concatenated gates (..., 4 f) as (..., 4, f)."""
    return gates.reshape(*gates.shape[:-1], 4, gates.shape[-1] // 4)


def _unstack_gates(gates: jax.Array) -> list[jax.Array]:
    return [lax.index_in_dim(gates, number, gates.ndim - 2, keepdims=False) for number in range(4)]


def _stack_gates(each: tuple[jax.Array, ...], index: jax.Array) -> jax.Array:
    """The inverse of `_unstack_gates`, by selects: XLA fuses them on a CPU, but stores a concatenation."""
    axes = (*range(index.ndim - 2), index.ndim - 1)
    i, f, u, o = (lax.broadcast_in_dim(one, index.shape, axes, out_sharding=explicit_sharding(index)) for one in each)
    return lax.select(index < 2, lax.select(index < 1, i, f), lax.select(index < 3, u, o))


def _gate_index(gates: jax.Array, c: jax.Array) -> jax.Array:
    """The gate, 0 to 3, that each element of `gates` (..., 4, f) belongs to.

    The barrier makes it depend on the carry. Otherwise JAX would hoist it, and all that follows from it, out of the
    scan over time, whose steps would then read whole arrays.
    """
    four, _ = lax.optimization_barrier((jnp.arange(4), lax.stop_gradient(c)))
    return lax.broadcast_in_dim(four, gates.shape, (gates.ndim - 2,), out_sharding=explicit_sharding(gates))


def _activate_gates(gates: jax.Array, index: jax.Array) -> jax.Array:
    """The logistic of each gate and the tanh of the candidate: `logistic(x) = tanh(x / 2) / 2 + 1 / 2`.

    One tanh for all of them, since XLA on a CPU would recompute four separate ones.
    """
    scale = _gate_scale(gates, index)
    return scale * lax.tanh(scale * gates) + (1 - scale)


def _gate_derivatives(active: jax.Array, index: jax.Array) -> jax.Array:
    """The derivative of each activation from its output: `y (1 - y)`, and `1 - y y` for the candidate."""
    scale = _gate_scale(active, index)
    return lax.square(scale) - lax.square(active - (1 - scale))


def _gate_scale(gates: jax.Array, index: jax.Array) -> jax.Array:
    return lax.select(index == CANDIDATE, lax.full_like(gates, 1.0), lax.full_like(gates, 0.5))


def _sum_gates(terms: jax.Array, mask: jax.Array) -> jax.Array:
    masked = lax.select(mask, terms, lax.full_like(terms, 0.0))
    return lax.reduce(masked, np.zeros((), terms.dtype), lax.add, (terms.ndim - 2,))
