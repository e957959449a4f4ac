"""Attention: each query's mean of the values, weighted by the softmax of its products with the keys."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Integer

from mlax.ops._activations import softmax_parts
from mlax.ops._attention_backend import AttentionBackend, attention_backend, cudnn_obstacle
from mlax.ops._attention_chunked import chunked_attention
from mlax.ops._attention_scores import (
    ScoreInputs,
    ScoreSpec,
    accum_einsum,
    add_biases,
    default_positions,
    dot_scores,
    visibility_mask,
)
from mlax.ops._checks import check_same_dtype
from mlax.ops._dropout import dropout as drop


def attention(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b s g k"],
    v: Float[Array, "b s g w"],
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
    dropout: float = 0.0,
    rng: jax.Array | None = None,
    precision: lax.PrecisionLike = None,
    accum_dtype: Any = None,
    implementation: AttentionBackend | None = None,
) -> Float[Array, "b t h w"]:
    """`softmax(softcap(scale * q k) + bias) v` for each head, in the dtype of `q`; h is a multiple of g.

    The softmax and the sums of products run in `accum_dtype` if one is given. `scale` is 1 / sqrt(k) unless given;
    `softcap` c makes of a score x the score c * tanh(x / c). A query sees a key unless one of these hides it:
    - `causal`: the key's position is after the query's. Positions count from 0 on both sides unless given.
    - `window` w: it lies w or more positions behind the query, or, where not causal, also w or more ahead.
    - `segments`: the two have different ids. One array for both sides, or a pair.
    - `lengths`: the key's index is not below its row's length, the rest being padding.
    - `mask`: the mask is False there.

    A query that sees nothing gets 0. `sinks` are one more score for each head, with nothing to see behind it.
    `alibi` subtracts slope times distance. `attention_backend` tells what computes it; `implementation` decides it.
    https://arxiv.org/abs/1706.03762, equation 1; grouped heads https://arxiv.org/abs/2305.13245.
    """
    _check(q, k, v, lengths=lengths, mask=mask, bias=bias, sinks=sinks, window=window, dropout=dropout, rng=rng)
    chosen = attention_backend(
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
        dropout=dropout,
        accum_dtype=accum_dtype,
        implementation=implementation,
    ).partition(":")[0]
    (b, t, h, width), (s, g) = q.shape, k.shape[1:3]
    spec = ScoreSpec(
        scale=width**-0.5 if scale is None else scale,
        causal=causal,
        window=window,
        softcap=softcap,
        alibi=alibi,
        ordered=positions is None,
        precision=precision,
        accum_dtype=None if accum_dtype is None else jnp.dtype(accum_dtype).name,
    )
    ours, theirs = segments if isinstance(segments, tuple) else (segments, segments)
    queries, keys = (
        (default_positions(t), default_positions(s)) if positions is None else map(jnp.atleast_2d, positions)
    )
    inputs = ScoreInputs(
        query_positions=queries,
        key_positions=keys,
        key_indices=lax.iota(np.int32, s),
        key_limit=lengths,
        query_segments=ours,
        key_segments=theirs,
        mask=_split_heads(mask, g),
        bias=_split_heads(bias, g),
    )
    grouped_sinks = None if sinks is None else sinks.reshape(g, h // g)

    def composed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q = q.reshape(b, t, g, h // g, width).transpose(0, 2, 3, 1, 4)  # (b, g, r, t, k)
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)  # (b, g, s, k)
        if chosen == "chunked" and t and s:  # nothing cannot be cut in tiles
            y = chunked_attention(q, k, v, inputs, grouped_sinks, spec)
        else:
            y = dense_attention(q, k, v, inputs, grouped_sinks, spec, dropout, rng)
        return y.transpose(0, 3, 1, 2, 4).reshape(b, t, h, v.shape[-1])

    if chosen != "cudnn":
        return composed(q, k, v)

    def fused(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias,
            scale=spec.scale,
            is_causal=causal,
            key_value_seq_lengths=None if lengths is None else lengths.astype(np.int32),
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )

    _check_cudnn(q, k, v, inputs, spec, bias, sinks, dropout)
    return lax.platform_dependent(q, k, v, cuda=fused, default=composed)  # part of a GPU program may run on its CPU


def dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    inputs: ScoreInputs,
    sinks: jax.Array | None,
    spec: ScoreSpec,
    dropout: float,
    rng: jax.Array | None,
) -> jax.Array:
    """Attention of q (b, g, r, t, k), k and v (b, g, s, k) with all scores held at once: (b, g, r, t, k)."""
    scores = add_biases(dot_scores(q * spec.scale, k, spec), inputs, spec)
    if sinks is not None:
        sinks = sinks[:, :, None, None].astype(scores.dtype)
    weights, total, _ = softmax_parts(scores, visibility_mask(inputs, spec), sinks)
    if dropout > 0.0 and rng is not None:
        weights = drop(weights, rng, dropout)
    # divided after the product: there are t x k quotients and not t x s, and the backward pass keeps one array less
    return (accum_einsum("bgrts,bgsk->bgrtk", weights.astype(v.dtype), v, spec) / total).astype(q.dtype)


def _split_heads(x: jax.Array | None, groups: int) -> jax.Array | None:
    """(b, h, t, s) as (b, g, r, t, s); a head axis of size 1 stays so."""
    if x is None:
        return None
    b, h, t, s = x.shape
    return x.reshape((b, 1, 1, t, s) if h == 1 else (b, groups, h // groups, t, s))


def _check(q: Any, k: Any, v: Any, *, lengths: Any, window: Any, dropout: float, rng: Any, **planes: Any) -> None:
    check_same_dtype("attention", q=q, k=k, v=v, bias=planes["bias"], sinks=planes["sinks"])
    for name, array in {"q": q, "k": k, "v": v}.items():
        if array.ndim != 4:
            raise ValueError(f"attention: {name} has the shape {array.shape}, but must be (batch, time, heads, width).")
    (b, t, h, width), (_, s, g, _) = q.shape, k.shape
    if k.shape[:3] != v.shape[:3] or (k.shape[0], k.shape[3]) != (b, width):
        raise ValueError(
            f"attention: q {q.shape}, k {k.shape} and v {v.shape} do not fit; they differ in time or heads."
        )
    if g == 0 or h % g:
        raise ValueError(f"attention: {h} query heads are no multiple of {g} key-value heads.")
    for name in ("mask", "bias"):
        plane = planes[name]
        if plane is None:
            continue
        if plane.ndim != 4 or any(has not in (1, size) for has, size in zip(plane.shape, (b, h, t, s), strict=True)):
            raise ValueError(
                f"attention: the {name} has the shape {plane.shape}, but needs four axes: batch, heads, queries, keys; "
                f"each of the size {(b, h, t, s)} or 1. Add what is missing with {name}[:, None], say."
            )
    if planes["sinks"] is not None and planes["sinks"].shape != (h,):
        raise ValueError(
            f"attention: sinks have the shape {planes['sinks'].shape}, but need one for each head: ({h},)."
        )
    if window is not None and window < 1:
        raise ValueError(f"attention: window is {window}, but must be at least 1, the query's own position.")
    if lengths is not None:
        if lengths.shape != (b,):
            raise ValueError(f"attention: lengths have the shape {lengths.shape}, but need one for each row: ({b},).")
        longest = 0 if isinstance(lengths, Tracer) else np.max(np.asarray(lengths), initial=0)
        if longest > s:
            raise ValueError(f"attention: lengths go up to {longest}, but there are only {s} keys.")
    if dropout > 0.0 and rng is None:
        raise ValueError("attention: there is no key to drop by; pass rng=.")


def _check_cudnn(
    q: Any, k: Any, v: Any, inputs: ScoreInputs, spec: ScoreSpec, bias: Any, sinks: Any, dropout: float
) -> None:
    others = {
        "segments": inputs.query_segments is not None,
        "positions": not spec.ordered,
        "a mask": inputs.mask is not None,
        "ALiBi": spec.alibi,
        "a soft cap": spec.softcap is not None,
        "sinks": sinks is not None,
        "dropout": dropout > 0.0,
    }
    obstacle = cudnn_obstacle(q, k, v, causal=spec.causal, window=spec.window, bias=bias, others=others)
    if obstacle is not None:
        raise ValueError(f"attention: cuDNN was asked for, but {obstacle}; leave implementation out to let it choose.")
