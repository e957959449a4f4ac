"""Attention: for each query, the mean of the values weighted by the softmax of its products with the keys."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Integer

from mlax.ops._activations import softmax_parts
from mlax.ops._attention_backend import AttentionBackend, attention_backend
from mlax.ops._attention_chunked import chunked_attention
from mlax.ops._attention_scores import ScoreInputs, ScoreSpec, accum_einsum, add_biases, dot_scores, visibility_mask
from mlax.ops._checks import check_same_dtype
from mlax.ops._dropout import dropout as apply_dropout


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

    The softmax and the sums of products are computed in `accum_dtype` if given. `scale` is 1 / sqrt(k) unless given;
    `softcap` c maps a score x to c * tanh(x / c). A query attends to a key unless one of these masks it:
    - `causal`: the key's position is after the query's. Positions are 0, 1, 2, ... for both unless given.
    - `window` w: the key is w or more positions behind the query, or, if not causal, w or more ahead.
    - `segments`: the two have different ids. One array for both, or a pair.
    - `lengths`: the key's index is not below the length of its row: it is padding.
    - `mask`: the mask is False there.

    A query that attends to no key gives 0. `sinks` are one more score for each head, with the value 0. `alibi`
    subtracts slope times distance. `attention_backend` says what computes it; `implementation` chooses.
    https://arxiv.org/abs/1706.03762, equation 1; grouped heads https://arxiv.org/abs/2305.13245.
    """
    _check(q, k, v, lengths=lengths, mask=mask, bias=bias, sinks=sinks, window=window, dropout=dropout, rng=rng)
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
    query_segments, key_segments = segments if isinstance(segments, tuple) else (segments, segments)
    if positions is None:
        query_positions, key_positions = (lax.iota(np.int32, length)[None] for length in (t, s))
    else:
        query_positions, key_positions = map(jnp.atleast_2d, positions)
    inputs = ScoreInputs(
        query_positions=query_positions,
        key_positions=key_positions,
        key_indices=lax.iota(np.int32, s),
        key_limit=lengths,
        query_segments=query_segments,
        key_segments=key_segments,
        mask=_split_heads(mask, g),
        bias=_split_heads(bias, g),
    )
    grouped_sinks = None if sinks is None else sinks.reshape(g, h // g)

    def composed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q = q.reshape(b, t, g, h // g, width).transpose(0, 2, 3, 1, 4)  # (b, g, r, t, k)
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)  # (b, g, s, k)
        if backend == "chunked" and t and s:  # an empty array has no tiles
            y = chunked_attention(q, k, v, inputs, grouped_sinks, spec)
        else:
            y = dense_attention(q, k, v, inputs, grouped_sinks, spec, dropout, rng)
        return y.transpose(0, 3, 1, 2, 4).reshape(b, t, h, v.shape[-1])

    if backend != "cudnn":
        return composed(q, k, v)

    def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
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

    return lax.platform_dependent(q, k, v, cuda=cudnn, default=composed)  # part of a GPU program may run on its CPU


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
    """Attention of q (b, g, r, t, k), k and v (b, g, s, k) with all scores in memory: (b, g, r, t, k)."""
    scores = add_biases(dot_scores(q * spec.scale, k, spec), inputs, spec)
    if sinks is not None:
        sinks = sinks[:, :, None, None].astype(scores.dtype)
    weights, total, _ = softmax_parts(scores, visibility_mask(inputs, spec), sinks)
    if dropout > 0.0 and rng is not None:
        weights = apply_dropout(weights, rng, dropout)
    # dividing after the product takes t x k divisions and not t x s, and the backward pass keeps one array less
    return (accum_einsum("bgrts,bgsk->bgrtk", weights.astype(v.dtype), v, spec) / total).astype(q.dtype)


def _split_heads(x: jax.Array | None, groups: int) -> jax.Array | None:
    """(b, h, t, s) as (b, g, r, t, s); a head axis of size 1 becomes two."""
    if x is None:
        return None
    b, h, t, s = x.shape
    return x.reshape((b, 1, 1, t, s) if h == 1 else (b, groups, h // groups, t, s))


def _check(
    q: Any,
    k: Any,
    v: Any,
    *,
    lengths: Any,
    mask: Any,
    bias: Any,
    sinks: Any,
    window: int | None,
    dropout: float,
    rng: Any,
) -> None:
    check_same_dtype("attention", q=q, k=k, v=v, bias=bias, sinks=sinks)
    for name, array in {"q": q, "k": k, "v": v}.items():
        if array.ndim != 4:
            raise ValueError(f"attention: {name} has the shape {array.shape}, but must be (batch, time, heads, width).")
    (b, t, h, width), (_, s, g, _) = q.shape, k.shape
    if k.shape[:3] != v.shape[:3] or (k.shape[0], k.shape[3]) != (b, width):
        raise ValueError(
            f"attention: q {q.shape}, k {k.shape} and v {v.shape} do not fit: k and v must have equal batch, time and "
            "heads, and q and k equal batch and width."
        )
    if g == 0 or h % g:
        raise ValueError(f"attention: {h} query heads are not a multiple of {g} key-value heads.")
    for name, array in {"mask": mask, "bias": bias}.items():
        if array is None:
            continue
        if array.ndim != 4 or any(has not in (1, size) for has, size in zip(array.shape, (b, h, t, s), strict=True)):
            raise ValueError(
                f"attention: the {name} has the shape {array.shape}, but needs four axes: batch, heads, queries, keys; "
                f"each of the size {(b, h, t, s)} or 1. Add missing axes, for example with {name}[:, None]."
            )
    if sinks is not None and sinks.shape != (h,):
        raise ValueError(f"attention: sinks have the shape {sinks.shape}, but need one for each head: ({h},).")
    if window is not None and window < 1:
        raise ValueError(f"attention: window is {window}, but must be at least 1, the query's own position.")
    if lengths is not None:
        if lengths.shape != (b,):
            raise ValueError(f"attention: lengths have the shape {lengths.shape}, but need one for each row: ({b},).")
        longest = 0 if isinstance(lengths, Tracer) else np.max(np.asarray(lengths), initial=0)
        if longest > s:
            raise ValueError(f"attention: lengths go up to {longest}, but there are only {s} keys.")
    if dropout > 0.0 and rng is None:
        raise ValueError("attention: dropout needs a key; pass rng=.")
