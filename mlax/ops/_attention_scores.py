"""The scores of attention and what may see what: the part that its whole and its chunked form share.

Inside, heads are split in two axes, h = g * r: g key-value heads, each read by r query heads.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax._jax import pcast_like
from mlax.ops._alibi import alibi_slopes


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is fixed about an attention while it is traced."""

    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    ordered: bool = True  # positions are 0, 1, 2, ... on both sides
    precision: Any = None
    accum_dtype: Any = None


class Sight(NamedTuple):
    """What decides which query sees which key, and how well; None where it plays no role. Axes of size 1 broadcast."""

    query_positions: jax.Array  # (b, t) int
    key_positions: jax.Array  # (b, s) int
    key_indices: jax.Array  # (s,) int
    key_limit: jax.Array | None = None  # (b,) int: keys from this index on are padding
    query_segments: jax.Array | None = None  # (b, t) int
    key_segments: jax.Array | None = None  # (b, s) int
    mask: jax.Array | None = None  # (b, g, r, t, s) bool
    bias: jax.Array | None = None  # (b, g, r, t, s)


def raw_scores(q: jax.Array, k: jax.Array, rule: Rule) -> jax.Array:
    """The scaled and capped products of q (b, g, r, t, k), scaled already, and k (b, g, s, k): (b, g, r, t, s)."""
    scores = product("bgrtk,bgsk->bgrts", q, k, rule)
    if rule.softcap is not None:
        scores = lax.tanh(scores / rule.softcap) * rule.softcap
    return scores


def biased(scores: jax.Array, sight: Sight, rule: Rule) -> jax.Array:
    """The scores (b, g, r, t, s) with the biases added."""
    if rule.alibi:
        distance = jnp.abs(_offsets(sight)).astype(scores.dtype)  # (b, 1, 1, t, s)
        g, r = scores.shape[1:3]
        slopes = jnp.asarray(alibi_slopes(g * r).reshape(g, r, 1, 1).astype(scores.dtype))
        scores = scores - slopes * distance
    if sight.bias is not None:
        scores = scores + sight.bias.astype(scores.dtype)
    return scores


def visible(sight: Sight, rule: Rule) -> jax.Array | None:
    """Which query sees which key, broadcasting to (b, g, r, t, s); None: each sees all."""
    seen: list[jax.Array] = []
    if rule.causal:
        seen.append(_offsets(sight) >= 0)
    if rule.window is not None:
        offsets = _offsets(sight)
        seen.append(offsets < rule.window)
        if not rule.causal:
            seen.append(offsets > -rule.window)
    if sight.key_limit is not None:
        seen.append((sight.key_indices[None, :] < sight.key_limit[:, None])[:, None, None, None, :])
    if sight.query_segments is not None and sight.key_segments is not None:
        same = sight.query_segments[:, :, None] == sight.key_segments[:, None, :]
        seen.append(same[:, None, None])
    if sight.mask is not None:
        seen.append(sight.mask)
    return functools.reduce(jnp.logical_and, seen) if seen else None


def product(subscripts: str, a: jax.Array, b: jax.Array, rule: Rule) -> jax.Array:
    """An einsum whose sums, and result, are in accum_dtype if there is one; its gradients multiply a's dtype."""
    if rule.accum_dtype is None or jnp.dtype(rule.accum_dtype) == a.dtype:
        return jnp.einsum(subscripts, a, b, precision=rule.precision)
    return _wide_product(subscripts, rule, *pcast_like((a, b), (a, b)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _wide_product(subscripts: str, rule: Rule, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=rule.precision, preferred_element_type=rule.accum_dtype)


def _wide_product_fwd(subscripts: str, rule: Rule, a: jax.Array, b: jax.Array) -> tuple[jax.Array, Any]:
    return _wide_product(subscripts, rule, a, b), (a, b)


def _wide_product_bwd(subscripts: str, rule: Rule, saved: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    # JAX's own rule would multiply float32 by bfloat16, which no tensor core does
    a, b = saved
    (left, right), out = subscripts.split("->")[0].split(","), subscripts.split("->")[1]
    narrow = grad.astype(a.dtype)
    by_a: Any = _wide_product(f"{out},{right}->{left}", rule, narrow, b)
    by_b: Any = _wide_product(f"{out},{left}->{right}", rule, narrow, a)
    return by_a.astype(a.dtype), by_b.astype(b.dtype)


_wide_product.defvjp(_wide_product_fwd, _wide_product_bwd)


def _offsets(sight: Sight) -> jax.Array:
    """How far each key lies behind each query: (b, 1, 1, t, s)."""
    offsets = sight.query_positions[:, :, None] - sight.key_positions[:, None, :]
    return offsets[:, None, None]


def consecutive(length: int) -> jax.Array:
    """The positions 0, 1, 2, ... of one row: (1, length)."""
    return lax.iota(np.int32, length)[None]
