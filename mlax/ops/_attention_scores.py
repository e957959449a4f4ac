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
from mlax.ops._positions import alibi_slopes


@dataclasses.dataclass(frozen=True)
class ScoreSpec:
    """What is fixed about an attention while it is traced."""

    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    ordered: bool = True  # positions are 0, 1, 2, ... on both sides
    precision: Any = None
    accum_dtype: Any = None


class ScoreInputs(NamedTuple):
    """What decides which query sees which key, and how well; None where it plays no role. Axes of size 1 broadcast."""

    query_positions: jax.Array  # (b, t) int
    key_positions: jax.Array  # (b, s) int
    key_indices: jax.Array  # (s,) int
    key_limit: jax.Array | None = None  # (b,) int: keys from this index on are padding
    query_segments: jax.Array | None = None  # (b, t) int
    key_segments: jax.Array | None = None  # (b, s) int
    mask: jax.Array | None = None  # (b, g, r, t, s) bool
    bias: jax.Array | None = None  # (b, g, r, t, s)


def dot_scores(q: jax.Array, k: jax.Array, spec: ScoreSpec) -> jax.Array:
    """The scaled and capped products of q (b, g, r, t, k), scaled already, and k (b, g, s, k): (b, g, r, t, s)."""
    scores = accum_einsum("bgrtk,bgsk->bgrts", q, k, spec)
    if spec.softcap is not None:
        scores = lax.tanh(scores / spec.softcap) * spec.softcap
    return scores


def add_biases(scores: jax.Array, inputs: ScoreInputs, spec: ScoreSpec) -> jax.Array:
    """The scores (b, g, r, t, s) with the biases added."""
    if spec.alibi:
        distance = jnp.abs(_relative_positions(inputs)).astype(scores.dtype)  # (b, 1, 1, t, s)
        g, r = scores.shape[1:3]
        slopes = jnp.asarray(alibi_slopes(g * r).reshape(g, r, 1, 1).astype(scores.dtype))
        scores = scores - slopes * distance
    if inputs.bias is not None:
        scores = scores + inputs.bias.astype(scores.dtype)
    return scores


def visibility_mask(inputs: ScoreInputs, spec: ScoreSpec) -> jax.Array | None:
    """Which query sees which key, broadcasting to (b, g, r, t, s); None: each sees all."""
    seen: list[jax.Array] = []
    if spec.causal:
        seen.append(_relative_positions(inputs) >= 0)
    if spec.window is not None:
        offsets = _relative_positions(inputs)
        seen.append(offsets < spec.window)
        if not spec.causal:
            seen.append(offsets > -spec.window)
    if inputs.key_limit is not None:
        seen.append((inputs.key_indices[None, :] < inputs.key_limit[:, None])[:, None, None, None, :])
    if inputs.query_segments is not None and inputs.key_segments is not None:
        same = inputs.query_segments[:, :, None] == inputs.key_segments[:, None, :]
        seen.append(same[:, None, None])
    if inputs.mask is not None:
        seen.append(inputs.mask)
    return functools.reduce(jnp.logical_and, seen) if seen else None


def accum_einsum(subscripts: str, a: jax.Array, b: jax.Array, spec: ScoreSpec) -> jax.Array:
    """An einsum whose sums, and result, are in accum_dtype if there is one; its gradients multiply a's dtype."""
    if spec.accum_dtype is None or jnp.dtype(spec.accum_dtype) == a.dtype:
        return jnp.einsum(subscripts, a, b, precision=spec.precision)
    return _accum_einsum(subscripts, spec, *pcast_like((a, b), (a, b)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _accum_einsum(subscripts: str, spec: ScoreSpec, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=spec.precision, preferred_element_type=spec.accum_dtype)


def _accum_einsum_fwd(subscripts: str, spec: ScoreSpec, a: jax.Array, b: jax.Array) -> tuple[jax.Array, Any]:
    return _accum_einsum(subscripts, spec, a, b), (a, b)


def _accum_einsum_bwd(subscripts: str, spec: ScoreSpec, saved: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    # JAX's own spec would multiply float32 by bfloat16, which no tensor core does
    a, b = saved
    (left, right), out = subscripts.split("->")[0].split(","), subscripts.split("->")[1]
    narrow = grad.astype(a.dtype)
    by_a: Any = _accum_einsum(f"{out},{right}->{left}", spec, narrow, b)
    by_b: Any = _accum_einsum(f"{out},{left}->{right}", spec, narrow, a)
    return by_a.astype(a.dtype), by_b.astype(b.dtype)


_accum_einsum.defvjp(_accum_einsum_fwd, _accum_einsum_bwd)


def _relative_positions(inputs: ScoreInputs) -> jax.Array:
    """How far each key lies behind each query: (b, 1, 1, t, s)."""
    offsets = inputs.query_positions[:, :, None] - inputs.key_positions[:, None, :]
    return offsets[:, None, None]


def default_positions(length: int) -> jax.Array:
    """The positions 0, 1, 2, ... of one row: (1, length)."""
    return lax.iota(np.int32, length)[None]
