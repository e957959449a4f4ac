"""Mixture of experts: routing, dispatch to the experts, and combination of their outputs."""

import math
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from mlax._jax import broadcast_like, divide, explicit_sharding, is_static, reduce_sum
from mlax.ops._norms import mean


class Routes(NamedTuple):
    """The experts of each token, and the router's losses."""

    expert: Any  # (b, t, k) int32, the most probable first
    gate: Any  # (b, t, k), the weights of the experts' outputs
    balance: Any  # (b,), 1 for equal loads, up to the number of experts if one gets all tokens
    z: Any  # (b,), the mean square of logsumexp(logits)


def route(logits: Float[Array, "b t e"], k: int, *, renormalize: bool = True) -> Routes:
    """Routing of a mixture of experts: the `k` most probable experts of each token by the softmax of `logits`, in the
    dtype of `logits`.

    A gate is the expert's probability, divided by the sum of the k unless k is 1 or `renormalize=False`.
    The balance loss is equation 4 of https://arxiv.org/abs/2101.03961 without its factor alpha, with the k choices of
    a token counted as k tokens; the z-loss is equation 5 of https://arxiv.org/abs/2202.08906. Both are for each row
    of the batch, before any token is dropped.
    """
    experts = logits.shape[-1]
    largest = lax.stop_gradient(jnp.max(logits, -1, keepdims=True, initial=-jnp.inf))
    exponentials = jnp.exp(logits - largest)
    total = lax.expand_dims(reduce_sum(exponentials, (2,)), (2,))
    probability = divide(exponentials, total)
    gate, expert = lax.top_k(probability, k)
    if renormalize and k > 1:
        gate = divide(gate, lax.expand_dims(reduce_sum(gate, (2,)), (2,)))
    chosen = _is_chosen(expert, experts)  # (b, t, k, e)
    share = mean(lax.convert_element_type(chosen, logits.dtype), (1, 2))[:, 0, 0]  # (b, e)
    balance = experts * reduce_sum(share * mean(probability, (1,))[:, 0], (1,))
    log_total = jnp.log(total) + largest
    return Routes(expert, gate, balance, mean(log_total * log_total, (1, 2))[:, 0, 0])


def jitter(x: Float[Array, "..."], rng: jax.Array, noise: float) -> Float[Array, "..."]:
    """Multiply each element by a uniform sample from `1 - noise` to `1 + noise`, the same one in every dtype."""
    bits = jax.random.bits(rng, x.shape, np.uint32, out_sharding=explicit_sharding(x))
    high = bits >> np.uint32(20)  # 12 bits, about as precise as float16
    return x * (1.0 - noise + high.astype(x.dtype) * (2.0 * noise / 4095.0))


def expert_capacity(tokens: Any, experts: int, k: int, factor: float) -> Any:
    """The most tokens that an expert takes: `factor` times an equal share, rounded up, and at most all `tokens`.

    Equation 3 of https://arxiv.org/abs/2101.03961.
    """
    share = Fraction(factor).limit_denominator(1_000_000) * k / experts  # of the tokens, which may be symbolic
    if share >= 1 or not is_static(tokens):
        return tokens if share >= 1 else -(-tokens * share.numerator // share.denominator)
    return max(1, math.ceil(tokens * share))


def expert_slots(expert: Integer[Array, "b t k"], experts: int, capacity: Any) -> Integer[Array, "b t k"]:
    """The slot of each choice among the `experts * capacity` slots of a row: `expert * capacity + rank`.

    Slots are assigned in the order of the tokens, so that no token loses its slot to a later one. A choice whose expert
    is full gets `experts * capacity`, which is out of bounds.
    """
    b, t, k = expert.shape
    flat = expert.reshape(b, t * k)
    chosen = _is_chosen(flat, experts).astype(jnp.int32)  # (b, t k, e)
    before = jnp.cumsum(chosen, axis=1) - chosen
    rank = jnp.take_along_axis(before, flat[..., None], axis=2)[..., 0]
    slot = jnp.where(rank < capacity, flat * capacity + rank, experts * capacity)
    return slot.reshape(b, t, k)


def dispatch(x: Float[Array, "b t d"], slot: Integer[Array, "b t k"], size: Any) -> Float[Array, "b size d"]:
    """Copy each token to its slots in a row of `size`; unused slots are 0."""
    t, k = slot.shape[1:]
    token = lax.broadcasted_iota(jnp.int32, (t, k), 0).reshape(t * k)

    def one(x: jax.Array, slot: jax.Array) -> jax.Array:
        source = jnp.full(size, t, jnp.int32).at[slot.reshape(-1)].set(token, mode="drop")
        return jnp.take(x, source, axis=0, mode="fill", fill_value=0)

    return jax.vmap(one)(x, slot)


def combine(
    out: Float[Array, "b size f"], slot: Integer[Array, "b t k"], gate: Float[Array, "b t k"]
) -> Float[Array, "b t f"]:
    """For each token, the sum of the outputs in its slots times their gates; a slot out of bounds counts as 0."""
    found = jax.vmap(lambda out, slot: jnp.take(out, slot, axis=0, mode="fill", fill_value=0))(out, slot)
    return reduce_sum(found * broadcast_like(gate[..., None], found), (2,))


def _is_chosen(expert: jax.Array, experts: int) -> jax.Array:
    """For each choice (...) of an expert, whether it is the first, the second and so on: (..., experts)."""
    each = lax.expand_dims(jnp.arange(experts, dtype=expert.dtype), range(expert.ndim))
    return expert[..., None] == each
