"""Attention with all scores in memory, and the scores and the mask over them, which chunked attention shares.

Heads are split into two axes, h = g * r: g key-value heads, each used by r query heads.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mlax._jax import broadcast_like, divide, is_static, is_unsharded_cpu, pcast_like, reduce_sum, with_jvps
from mlax.ops._activations import min_value, softmax_parts
from mlax.ops._dropout import dropout as apply_dropout
from mlax.ops._positions import alibi_slopes

MIN_BLOCK_ROWS = 64  # of queries, below which the products of a block are too small
MAX_BLOCKS = 4  # as each is a copy of the attention in the program


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
    has_keys: bool = False  # whether each row is known to have a key


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


def dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    inputs: ScoreInputs,
    sinks: jax.Array | None,
    spec: ScoreSpec,
    dropout: float = 0.0,
    rng: jax.Array | None = None,
) -> jax.Array:
    """Attention of q (b, g, r, t, k), k (b, g, s, k) and v (b, g, s, w) with all scores in memory: (b, g, r, t, w)."""
    if q.shape[3] == 1 and sinks is None and not dropout:
        return _attend_one(q, k, v, inputs, spec)
    weights, total = _unnormalized_weights(q, k, inputs, sinks, spec)
    if dropout > 0.0 and rng is not None:
        weights = apply_dropout(weights, rng, dropout)
    # dividing after the product takes t x k divisions and not t x s, and the backward pass keeps one array less
    return divide(accum_einsum("bgrts,bgsk->bgrtk", weights.astype(v.dtype), v, spec), total).astype(q.dtype)


def _attend_one(q: jax.Array, k: jax.Array, v: jax.Array, inputs: ScoreInputs, spec: ScoreSpec) -> jax.Array:
    """Attention of one query, as in decoding: XLA computes a softmax of this form in one kernel on a GPU."""
    scores = add_biases(dot_scores(q * spec.scale, k, spec), inputs, spec)
    visible = visibility_mask(inputs, spec)
    if visible is not None:
        scores = jnp.where(visible, scores, min_value(scores.dtype))
    top = lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    numerator = lax.exp(scores - top)
    total = lax.expand_dims(reduce_sum(numerator, (numerator.ndim - 1,)), (numerator.ndim - 1,))
    weights = divide(numerator, total)
    if visible is not None:
        weights = jnp.where(visible.any(axis=-1, keepdims=True), weights, 0.0)
    if spec.accum_dtype == jnp.float32 and v.dtype.itemsize < 4:  # summed in float32 anyway, and cast by the product
        spec = dataclasses.replace(spec, accum_dtype=None)
    return accum_einsum("bgrts,bgsk->bgrtk", weights.astype(v.dtype), v, spec).astype(q.dtype)


def prefers_causal_blocks(q: jax.Array, k: jax.Array, spec: ScoreSpec) -> bool:
    """Whether to compute causal attention of q (b, t, h, k) and k (b, s, g, k) in blocks of queries.

    On a CPU most of the scores that are masked anyway then cost nothing (benchmarks/layers.py).
    """
    return (
        is_unsharded_cpu(q)
        and is_unsharded_cpu(k)
        and spec.causal
        and spec.ordered
        and is_static(q.shape[1], k.shape[1])
        and q.shape[1] >= 2 * MIN_BLOCK_ROWS
    )


def causal_block_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, inputs: ScoreInputs, sinks: jax.Array | None, spec: ScoreSpec
) -> jax.Array:
    """`dense_attention` of ordered queries and keys, in blocks of queries, each with the keys that it may attend to."""
    t, s = q.shape[3], k.shape[2]
    rows = -(-t // min(MAX_BLOCKS, t // MIN_BLOCK_ROWS))
    blocks = []
    for start in range(0, t, rows):
        stop = min(start + rows, t)
        queries = lax.slice_in_dim(q, start, stop, axis=3)
        keys, values = (lax.slice_in_dim(each, 0, min(stop, s), axis=2) for each in (k, v))
        blocks.append(dense_attention(queries, keys, values, _slice_inputs(inputs, start, stop), sinks, spec))
    return lax.concatenate(blocks, 3)


def _slice_inputs(inputs: ScoreInputs, start: int, stop: int) -> ScoreInputs:
    """The inputs of the queries from `start` to `stop` and the keys before `stop`; axes of size 1 stay."""

    def cut(x: Any, queries: int | None = None, keys: int | None = None) -> Any:
        for axis, first in ((queries, start), (keys, 0)):
            if x is not None and axis is not None and x.shape[axis] != 1:
                x = lax.slice_in_dim(x, first, min(stop, x.shape[axis]), axis=axis)
        return x

    return ScoreInputs(
        query_positions=cut(inputs.query_positions, queries=1),
        key_positions=cut(inputs.key_positions, keys=1),
        key_indices=cut(inputs.key_indices, keys=0),
        key_limit=inputs.key_limit,
        query_segments=cut(inputs.query_segments, queries=1),
        key_segments=cut(inputs.key_segments, keys=1),
        mask=cut(inputs.mask, queries=3, keys=4),
        bias=cut(inputs.bias, queries=3, keys=4),
    )


def dense_weights(
    q: jax.Array, k: jax.Array, inputs: ScoreInputs, sinks: jax.Array | None, spec: ScoreSpec
) -> jax.Array:
    """The weights (b, g, r, t, s) with which `dense_attention` sums the values."""
    weights, total = _unnormalized_weights(q, k, inputs, sinks, spec)
    return divide(weights, total).astype(q.dtype)


def _unnormalized_weights(
    q: jax.Array, k: jax.Array, inputs: ScoreInputs, sinks: jax.Array | None, spec: ScoreSpec
) -> tuple[jax.Array, jax.Array]:
    scores = add_biases(dot_scores(q * spec.scale, k, spec), inputs, spec)
    if sinks is not None:
        sinks = sinks[None, :, :, None, None].astype(scores.dtype)
    weights, total, _ = softmax_parts(scores, visibility_mask(inputs, spec), sinks)
    return weights, total


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
        slopes = jnp.asarray(alibi_slopes(g * r).reshape(1, g, r, 1, 1).astype(scores.dtype))
        scores = scores - slopes * distance
    if inputs.bias is not None:
        scores = scores + broadcast_like(inputs.bias.astype(scores.dtype), scores)
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
    return _wide_einsum(subscripts, spec.precision, spec.accum_dtype)(*pcast_like((a, b), (a, b)))


@functools.cache
def _wide_einsum(subscripts: str, precision: Any, accum_dtype: Any) -> Callable[..., Any]:
    """The einsum of narrow arrays with a wide result. Tangents, and so cotangents, are multiplied and rounded narrow.

    JAX's own rule would multiply a wide cotangent by a narrow array, which no tensor core does.
    """
    narrow = functools.partial(jnp.einsum, subscripts, precision=precision)
    return with_jvps(
        functools.partial(narrow, preferred_element_type=accum_dtype),
        lambda dot, a, b: narrow(dot, b).astype(accum_dtype),
        lambda dot, a, b: narrow(a, dot).astype(accum_dtype),
    )


def _relative_positions(inputs: ScoreInputs) -> jax.Array:
    """The position of each query minus that of each key: (b, 1, 1, t, s)."""
    offsets = inputs.query_positions[:, :, None] - inputs.key_positions[:, None, :]
    return offsets[:, None, None]
