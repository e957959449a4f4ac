"""Mixture of experts: which tokens go to which experts, there and back."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from mlax._jax import explicit_sharding
from mlax.ops._norms import mean


class Routes(NamedTuple):
    """Where each token goes, and how well the experts are used."""

    expert: Any  # (b, t, k) int32, the experts of each token, best first
    gate: Any  # (b, t, k), the weights of their outputs
    balance: Any  # (b,), 1 where all experts get equally much, up to the number of experts where one gets all
    z: Any  # (b,), grows with the logits


def route(logits: Float[Array, "b t e"], k: int, *, renormalize: bool = True) -> Routes:
    """The `k` likeliest experts of each token by the softmax of `logits`, all in the dtype of `logits`.

    A gate is the expert's probability, divided by the sum of the k unless k is 1 or `renormalize=False`.
    The balance loss is equation 4 of https://arxiv.org/abs/2101.03961 without its factor alpha, with the k choices of
    a token counted as k tokens; the z-loss is equation 5 of https://arxiv.org/abs/2202.08906. Both are for each row
    of the batch, over its own tokens, and before any token is dropped.
    """
    experts = logits.shape[-1]
    largest = lax.stop_gradient(jnp.max(logits, -1, keepdims=True, initial=-jnp.inf))
    powers = jnp.exp(logits - largest)
    total = lax.expand_dims(lax.reduce_sum(powers, (2,)), (2,))
    probability = powers / total
    gate, expert = lax.top_k(probability, k)
    if renormalize and k > 1:
        gate = gate / lax.expand_dims(lax.reduce_sum(gate, (2,)), (2,))
    chosen = expert[..., None] == jnp.arange(experts, dtype=expert.dtype)  # (b, t, k, e)
    share = mean(lax.convert_element_type(chosen, logits.dtype), (1, 2))[:, 0, 0]  # (b, e)
    balance = experts * lax.reduce_sum(share * mean(probability, (1,))[:, 0], (1,))
    log_total = jnp.log(total) + largest
    return Routes(expert, gate, balance, mean(log_total * log_total, (1, 2))[:, 0, 0])


def jitter(x: Float[Array, "..."], rng: jax.Array, noise: float) -> Float[Array, "..."]:
    """Multiply each element by a number drawn evenly from `1 - noise` to `1 + noise`: in every dtype the same one."""
    bits = jax.random.bits(rng, x.shape, np.uint32, out_sharding=explicit_sharding(x))
    high = bits >> np.uint32(20)  # 12 of them, which float16 holds
    return x * (1.0 - noise + high.astype(x.dtype) * (2.0 * noise / 4095.0))


def expert_capacity(tokens: int, experts: int, k: int, factor: float) -> int:
    """How many tokens an expert takes: `factor` times its equal share, rounded up, and all `tokens` at most.

    Equation 3 of https://arxiv.org/abs/2101.03961.
    """
    return max(1, min(tokens, math.ceil(factor * k * tokens / experts)))


def expert_slots(expert: Integer[Array, "b t k"], experts: int, capacity: int) -> Integer[Array, "b t k"]:
    """The place of each choice in a row of `capacity` places for each of the experts: `expert * capacity + rank`.

    Places are given to tokens in order, so that no token loses its place to a later one. A choice that comes when its
    expert is full has the place `experts * capacity`, which is none.
    """
    b, t, k = expert.shape
    flat = expert.reshape(b, t * k)
    chosen = (flat[..., None] == jnp.arange(experts, dtype=flat.dtype)).astype(jnp.int32)  # (b, t k, e)
    before = jnp.cumsum(chosen, axis=1) - chosen
    rank = jnp.take_along_axis(before, flat[..., None], axis=2)[..., 0]
    place = jnp.where(rank < capacity, flat * capacity + rank, experts * capacity)
    return place.reshape(b, t, k)


def dispatch(x: Float[Array, "b t d"], place: Integer[Array, "b t k"], size: int) -> Float[Array, "b size d"]:
    """Put each token at its places in a row of `size`; a place that nobody has is 0."""
    t, k = place.shape[1:]
    token = jnp.repeat(jnp.arange(t, dtype=jnp.int32), k)

    def one(x: jax.Array, place: jax.Array) -> jax.Array:
        source = jnp.full(size, t, jnp.int32).at[place.reshape(-1)].set(token, mode="drop")
        return jnp.take(x, source, axis=0, mode="fill", fill_value=0)

    return jax.vmap(one)(x, place)


def combine(
    out: Float[Array, "b size f"], place: Integer[Array, "b t k"], gate: Float[Array, "b t k"]
) -> Float[Array, "b t f"]:
    """For each token, the sum of what stands at its places times their gates; no place counts as 0."""
    found = jax.vmap(lambda out, place: jnp.take(out, place, axis=0, mode="fill", fill_value=0))(out, place)
    return lax.reduce_sum(found * gate[..., None], (2,))
