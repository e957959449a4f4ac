"""The scores of attention and the mask over them, which dense and chunked attention share.

Heads are split into two axes, h = g * r: g key-value heads, each used by r query heads.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mlax._jax import pcast_like
from mlax.ops._positions import alibi_slopes


@dataclasses.dataclass(frozen=True)
class ScoreSpec:
    """The static arguments of an attention."""

    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    ordered: bool = True  # positions are 0, 1, 2, ... for queries and keys
    precision: Any = None
    accum_dtype: Any = None


class ScoreInputs(NamedTuple):
    """The arrays besides q and k that the scores and their mask are computed from. Axes of size 1 broadcast."""

    query_positions: jax.Array  # (b, t) int
    key_positions: jax.Array  # (b, s) int
    key_indices: jax.Array  # (s,) int
    key_limit: jax.Array | None = None  # (b,) int: keys from this index on are padding
    query_segments: jax.Array | None = None  # (b, t) int
    key_segments: jax.Array | None = None  # (b, s) int
    mask: jax.Array | None = None  # (b, g, r, t, s) bool
    bias: jax.Array | None = None  # (b, g, r, t, s)


def dot_scores(q: jax.Array, k: jax.Array, spec: ScoreSpec) -> jax.Array:
    """The products of q (b, g, r, t, k), already scaled, and k (b, g, s, k), soft-capped: (b, g, r, t, s)."""
    scores = accum_einsum("bgrtk,bgsk->bgrts", q, k, spec)
    if spec.softcap is not None:
        scores = lax.tanh(scores / spec.softcap) * spec.softcap
    return scores


def add_biases(scores: jax.Array, inputs: ScoreInputs, spec: ScoreSpec) -> jax.Array:
    """The scores (b, g, r, t, s) plus ALiBi and the bias."""
    if spec.alibi:
        distance = jnp.abs(_relative_positions(inputs)).astype(scores.dtype)  # (b, 1, 1, t, s)
        g, r = scores.shape[1:3]
        slopes = jnp.asarray(alibi_slopes(g * r).reshape(g, r, 1, 1).astype(scores.dtype))
        scores = scores - slopes * distance
    if inputs.bias is not None:
        scores = scores + inputs.bias.astype(scores.dtype)
    return scores


def visibility_mask(inputs: ScoreInputs, spec: ScoreSpec) -> jax.Array | None:
    """Which query attends to which key, broadcasting to (b, g, r, t, s); None: every query to every key."""
    masks: list[jax.Array] = []
    if spec.causal:
        masks.append(_relative_positions(inputs) >= 0)
    if spec.window is not None:
        offsets = _relative_positions(inputs)
        masks.append(offsets < spec.window)
        if not spec.causal:
            masks.append(offsets > -spec.window)
    if inputs.key_limit is not None:
        masks.append((inputs.key_indices[None, :] < inputs.key_limit[:, None])[:, None, None, None, :])
    if inputs.query_segments is not None and inputs.key_segments is not None:
        same = inputs.query_segments[:, :, None] == inputs.key_segments[:, None, :]
        masks.append(same[:, None, None])
    if inputs.mask is not None:
        masks.append(inputs.mask)
    return functools.reduce(jnp.logical_and, masks) if masks else None


def accum_einsum(subscripts: str, a: jax.Array, b: jax.Array, spec: ScoreSpec) -> jax.Array:
    """An einsum with sums and result in `accum_dtype` if there is one; its gradients multiply in the dtype of a."""
    if spec.accum_dtype is None or jnp.dtype(spec.accum_dtype) == a.dtype:
        return jnp.einsum(subscripts, a, b, precision=spec.precision)
    return _accum_einsum(subscripts, spec, *pcast_like((a, b), (a, b)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _accum_einsum(subscripts: str, spec: ScoreSpec, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=spec.precision, preferred_element_type=spec.accum_dtype)


def _accum_einsum_fwd(subscripts: str, spec: ScoreSpec, a: jax.Array, b: jax.Array) -> tuple[jax.Array, Any]:
    return _accum_einsum(subscripts, spec, a, b), (a, b)


def _accum_einsum_bwd(subscripts: str, spec: ScoreSpec, residuals: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    # JAX's own rule would multiply float32 by bfloat16, which no tensor core does
    a, b = residuals
    (left, right), out = subscripts.split("->")[0].split(","), subscripts.split("->")[1]
    narrow = grad.astype(a.dtype)
    a_grad: Any = _accum_einsum(f"{out},{right}->{left}", spec, narrow, b)
    b_grad: Any = _accum_einsum(f"{out},{left}->{right}", spec, narrow, a)
    return a_grad.astype(a.dtype), b_grad.astype(b.dtype)


_accum_einsum.defvjp(_accum_einsum_fwd, _accum_einsum_bwd)


def _relative_positions(inputs: ScoreInputs) -> jax.Array:
    """The position of each query minus that of each key: (b, 1, 1, t, s)."""
    offsets = inputs.query_positions[:, :, None] - inputs.key_positions[:, None, :]
    return offsets[:, None, None]
