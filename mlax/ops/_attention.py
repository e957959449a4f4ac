"""Attention: for each query, the mean of the values weighted by the softmax of its products with the keys."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Integer

from mlax._jax import known_values
from mlax.core import check_is_dtype
from mlax.ops._attention_backend import AttentionBackend, attention_backend, find_kernel_keys, holds_too_many_scores
from mlax.ops._attention_checks import check_attention
from mlax.ops._attention_chunked import chunked_attention
from mlax.ops._attention_cudnn import cudnn_attention
from mlax.ops._attention_scores import (
    ScoreInputs,
    ScoreSpec,
    causal_block_attention,
    dense_attention,
    dense_weights,
    prefers_causal_blocks,
)


def attention(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b s g k"],
    v: Float[Array, "b s g w"],
    *,
    causal: bool = False,
    window: int | None = None,
    segments: Integer[Array, "b t"] | tuple[Integer[Array, "b t"], Integer[Array, "b s"]] | None = None,
    lengths: Integer[Array | np.ndarray, " b"] | None = None,
    positions: tuple[Integer[Array, "*b t"], Integer[Array, "*b s"]] | None = None,
    mask: Bool[Array, "#b #h #t #s"] | None = None,
    bias: Float[Array, "#b #h #t #s"] | None = None,
    alibi: bool = False,
    softcap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    rng: jax.Array | None = None,
    precision: lax.PrecisionLike = None,
    accum_dtype: Any = None,
    implementation: AttentionBackend | None = None,
) -> Float[Array, "b t h w"]:
    """Scaled dot-product attention: `softmax(softcap(scale * q k) + bias) v` for each head, in the dtype of `q`; h is a
    multiple of g.

    The softmax and the sums of products are computed in `accum_dtype` if given. `scale` is 1 / sqrt(k) unless given;
    `softcap` c maps a score x to c * tanh(x / c). A query attends to a key unless one of these masks it:
    - `causal`: the key's position is after the query's. Positions are 0, 1, 2, ... for both unless given.
    - `window` w: the key is w or more positions behind the query, or, if not causal, w or more ahead.
    - `segments`: the two have different ids. One array for both, or a pair if queries and keys differ.
    - `lengths`: the key's index is not below the length of its row: it is padding.
    - `mask`: the mask, which is boolean, is False there. What PyTorch calls a float mask is a `bias`.

    A query that attends to no key gives 0. `sinks` are one more score for each head, with the value 0. `alibi`
    subtracts slope times distance. `attention_backend` says what computes it; `implementation` chooses.
    https://arxiv.org/abs/1706.03762, equation 1; grouped heads https://arxiv.org/abs/2305.13245.
    """
    check_is_dtype("attention", accum_dtype=accum_dtype)
    check_attention(
        q,
        k,
        v,
        segments=segments,
        lengths=lengths,
        positions=positions,
        mask=mask,
        bias=bias,
        sinks=sinks,
        window=window,
        softcap=softcap,
        dropout=dropout,
        rng=rng,
    )
    backend = attention_backend(
        q,
        k,
        v,
        causal=causal,
        window=window,
        segments=segments,
        lengths=lengths,
        positions=positions,
        mask=mask,
        bias=bias,
        alibi=alibi,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        dropout=dropout,
        accum_dtype=accum_dtype,
        implementation=implementation,
    ).partition(":")[0]
    spec = _score_spec(q, scale, causal, window, softcap, alibi, positions is None, precision, accum_dtype)
    consts = _score_inputs(q, k, segments=segments, lengths=lengths, positions=positions, mask=mask)
    primals = (q, k, v, bias, sinks)
    if dropout > 0.0:
        return _attend_dense(primals, consts, spec, dropout, rng)
    # cuDNN's derivatives other than the gradient are those of a form that does not hold all scores if they are many
    composed = _compose(
        spec,
        is_chunked=backend == "chunked" or (backend == "cudnn" and holds_too_many_scores(q, k)),
        in_blocks=implementation is None and prefers_causal_blocks(q, k, spec),
    )
    if backend != "cudnn":
        return composed(primals, consts)
    known = None if lengths is None else known_values(lengths)
    spec = replace(spec, has_keys=known is not None and bool(np.all(known > 0)))
    kernel_keys = find_kernel_keys(q, k, v, bias, lengths, spec)
    return cudnn_attention(spec, composed, kernel_keys)(primals, consts)


def attention_weights(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b s g k"],
    *,
    causal: bool = False,
    window: int | None = None,
    segments: Integer[Array, "b t"] | tuple[Integer[Array, "b t"], Integer[Array, "b s"]] | None = None,
    lengths: Integer[Array, " b"] | None = None,
    positions: tuple[Integer[Array, "*b t"], Integer[Array, "*b s"]] | None = None,
    mask: Bool[Array, "#b #h #t #s"] | None = None,
    bias: Float[Array, "#b #h #t #s"] | None = None,
    alibi: bool = False,
    softcap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    scale: float | None = None,
    precision: lax.PrecisionLike = None,
    accum_dtype: Any = None,
) -> Float[Array, "b h t s"]:
    """The weights with which `attention` sums the values, before dropout, in the dtype of `q`.

    They sum to 1 for each query, less what its sink takes, or to 0 if it attends to no key. All of them are in memory.
    """
    check_is_dtype("attention_weights", accum_dtype=accum_dtype)
    check_attention(
        q,
        k,
        k,
        segments=segments,
        lengths=lengths,
        positions=positions,
        mask=mask,
        bias=bias,
        sinks=sinks,
        window=window,
        softcap=softcap,
        dropout=0.0,
        rng=None,
    )
    spec = _score_spec(q, scale, causal, window, softcap, alibi, positions is None, precision, accum_dtype)
    consts = _score_inputs(q, k, segments=segments, lengths=lengths, positions=positions, mask=mask)
    grouped_q, grouped_k, _, inputs, grouped_sinks = _group_heads((q, k, None, bias, sinks), consts)
    weights = dense_weights(grouped_q, grouped_k, inputs, grouped_sinks, spec)
    return weights.reshape(q.shape[0], q.shape[2], q.shape[1], k.shape[1])


@functools.cache
def _compose(spec: ScoreSpec, *, is_chunked: bool, in_blocks: bool) -> Callable[..., jax.Array]:
    """Attention of (q, k, v, bias, sinks) by XLA's operations."""
    form = _attend_chunked if is_chunked else _attend_blocks if in_blocks else _attend_dense
    return functools.partial(form, spec=spec)


def _attend_dense(
    primals: Any, consts: ScoreInputs, spec: ScoreSpec, dropout: float = 0.0, rng: jax.Array | None = None
) -> jax.Array:
    q, k, v, inputs, sinks = _group_heads(primals, consts)
    return _ungroup_heads(dense_attention(q, k, v, inputs, sinks, spec, dropout, rng))


def _attend_blocks(primals: Any, consts: ScoreInputs, spec: ScoreSpec) -> jax.Array:
    q, k, v, inputs, sinks = _group_heads(primals, consts)
    return _ungroup_heads(causal_block_attention(q, k, v, inputs, sinks, spec))


def _attend_chunked(primals: Any, consts: ScoreInputs, spec: ScoreSpec) -> jax.Array:
    q, k, v, inputs, sinks = _group_heads(primals, consts)
    form = chunked_attention if q.shape[3] and k.shape[2] else dense_attention  # an empty array has no tiles
    return _ungroup_heads(form(q, k, v, inputs, sinks, spec))


def _group_heads(primals: Any, consts: ScoreInputs) -> tuple[Any, Any, Any, ScoreInputs, Any]:
    """The primals with grouped heads: q (b, t, h, k) as (b, g, r, t, k), k as (b, g, s, k), ..."""
    q, k, v, bias, sinks = primals
    (b, t, h, width), g = q.shape, k.shape[2]
    q = q.reshape(b, t, g, h // g, width).transpose(0, 2, 3, 1, 4)
    k, v = (None if x is None else x.transpose(0, 2, 1, 3) for x in (k, v))
    inputs = consts._replace(mask=_split_heads(consts.mask, g), bias=_split_heads(bias, g))
    return q, k, v, inputs, None if sinks is None else sinks.reshape(g, h // g)


def _ungroup_heads(y: jax.Array) -> jax.Array:
    b, g, r, t, width = y.shape
    return y.transpose(0, 3, 1, 2, 4).reshape(b, t, g * r, width)


def _split_heads(x: jax.Array | None, groups: int) -> jax.Array | None:
    """(b, h, t, s) as (b, g, r, t, s); a head axis of size 1 becomes two."""
    if x is None:
        return None
    b, h, t, s = x.shape
    return x.reshape((b, 1, 1, t, s) if h == 1 else (b, groups, h // groups, t, s))


def _score_spec(
    q: jax.Array,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    alibi: bool,
    ordered: bool,
    precision: lax.PrecisionLike,
    accum_dtype: Any,
) -> ScoreSpec:
    """What is static of the scores, with its defaults filled in."""
    dtype = None if accum_dtype is None else jnp.dtype(accum_dtype).name
    return ScoreSpec(
        scale=float(q.shape[-1]) ** -0.5 if scale is None else scale,
        causal=causal,
        window=window,
        softcap=softcap,
        alibi=alibi,
        ordered=ordered,
        precision=precision,
        accum_dtype=dtype,
    )


def _score_inputs(q: jax.Array, k: jax.Array, *, segments: Any, lengths: Any, positions: Any, mask: Any) -> ScoreInputs:
    """The arrays that mask and order the scores; heads are not split yet, and the bias is left out."""
    t, s = q.shape[1], k.shape[1]
    query_segments, key_segments = segments if isinstance(segments, tuple) else (segments, segments)
    if positions is None:
        query_positions, key_positions = (lax.iota(np.int32, length)[None] for length in (t, s))
    else:
        query_positions, key_positions = map(jnp.atleast_2d, positions)
    return ScoreInputs(
        query_positions=query_positions,
        key_positions=key_positions,
        key_indices=lax.iota(np.int32, s),
        key_limit=lengths,
        query_segments=query_segments,
        key_segments=key_segments,
        mask=mask,
    )
