"""Attention in tiles with a running softmax, so that no t x s array exists, forward or backward.

Algorithms 1 and 2 of https://arxiv.org/abs/2307.08691. Tiles that the causal mask or the window hides entirely are
skipped. Forward mode too goes by tiles; gradients of gradients hold all scores, as `dense_attention` does.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax._jax import explicit_sharding, pcast_like, reduce_sum, with_vjp
from mlax.ops._activations import guard_zero, min_value, safe_max
from mlax.ops._attention_scores import (
    ScoreInputs,
    ScoreSpec,
    accum_einsum,
    add_biases,
    dense_attention,
    dot_scores,
    visibility_mask,
)

QUERY_BLOCK, KEY_BLOCK = 512, 512  # the sides of a tile


class Tiles(NamedTuple):
    """How the t x s scores are split."""

    queries: int  # in a block
    keys: int
    rows: int  # blocks of queries
    columns: int  # blocks of keys


def chunked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, inputs: ScoreInputs, sinks: jax.Array | None, spec: ScoreSpec
) -> jax.Array:
    """Attention of q (b, g, r, t, k), k and v (b, g, s, k): (b, g, r, t, k). Arguments as in `dense_attention`."""
    t, s = q.shape[3], k.shape[2]
    tiles = Tiles(min(QUERY_BLOCK, t), min(KEY_BLOCK, s), -(-t // QUERY_BLOCK), -(-s // KEY_BLOCK))
    more_t, more_s = tiles.queries * tiles.rows - t, tiles.keys * tiles.columns - s
    if more_s and inputs.key_limit is None:
        inputs = inputs._replace(key_limit=jnp.full(1, s, np.int32))
    inputs = ScoreInputs(
        query_positions=_pad_ends(inputs.query_positions, {1: more_t}),
        key_positions=_pad_ends(inputs.key_positions, {1: more_s}),
        key_indices=lax.iota(np.int32, s + more_s),
        key_limit=None if inputs.key_limit is None else jnp.minimum(inputs.key_limit, s),
        query_segments=_pad_ends(inputs.query_segments, {1: more_t}),
        key_segments=_pad_ends(inputs.key_segments, {1: more_s}),
        mask=_pad_ends(inputs.mask, {3: more_t, 4: more_s}),
        bias=_pad_ends(inputs.bias, {3: more_t, 4: more_s}),
    )
    q, k, v = _pad_ends(q * spec.scale, {3: more_t}), _pad_ends(k, {2: more_s}), _pad_ends(v, {2: more_s})
    primals, consts = pcast_like(((q, k, v, inputs.bias, sinks), inputs._replace(bias=None)), (q, k, v, inputs, sinks))
    return _attend_tiles(spec, tiles)(primals, consts)[:, :, :, :t]


@functools.cache
def _attend_tiles(spec: ScoreSpec, tiles: Tiles) -> Callable[..., jax.Array]:
    """Attention of (q, k, v, bias, sinks), q already scaled, to (b, g, r, t, w)."""
    spec = dataclasses.replace(spec, scale=1.0)

    def attend_dense(primals: Any, consts: ScoreInputs) -> jax.Array:
        q, k, v, bias, sinks = primals
        return dense_attention(q, k, v, consts._replace(bias=bias), sinks, spec)

    rules = (functools.partial(rule, spec, tiles) for rule in (_forward, _backward, _tangent))
    return with_vjp(attend_dense, *rules)


class Residuals(NamedTuple):
    """What the backward pass needs besides the arguments."""

    y: jax.Array  # (b, g, r, t, w), the result
    top: jax.Array  # (b, g, r, t, 1), the largest score of a query
    total: jax.Array  # (b, g, r, t, 1), the sum of its weights


def _forward(spec: ScoreSpec, tiles: Tiles, primals: Any, consts: ScoreInputs) -> tuple[jax.Array, Residuals]:
    q, k, v, bias, sinks = primals
    inputs, wide = consts._replace(bias=bias), jnp.dtype(spec.accum_dtype or q.dtype)

    def row(i: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        queries = _slice_block(q, 3, i, tiles.queries)

        def tile(j: Any, carry: Any) -> Any:
            top, total, sums = carry
            local = _slice_inputs(inputs, tiles, i, j)
            scores = add_biases(dot_scores(queries, _slice_block(k, 2, j, tiles.keys), spec), local, spec)
            mask = visibility_mask(local, spec)
            if mask is not None:
                scores = jnp.where(mask, scores, min_value(wide))
            new_top = jnp.maximum(top, lax.reduce_max(scores, (4,))[..., None])
            weights, decay = lax.exp(scores - safe_max(new_top)), lax.exp(top - safe_max(new_top))
            total = total * decay + reduce_sum(weights, (4,))[..., None]
            values = _slice_block(v, 2, j, tiles.keys)
            return (
                new_top,
                total,
                sums * decay + accum_einsum("bgrts,bgsk->bgrtk", weights.astype(v.dtype), values, spec),
            )

        zeros = jnp.zeros_like(queries[..., :1], wide)
        start = (
            # a sink is an entry before all keys, with the value 0
            jnp.full_like(zeros, min_value(wide)) if sinks is None else _broadcast_sinks(sinks, zeros),
            zeros if sinks is None else jnp.ones_like(zeros),
            jnp.broadcast_to(zeros, (*zeros.shape[:-1], v.shape[-1])),
        )
        top, total, sums = lax.fori_loop(*_visible_key_blocks(spec, tiles, i), tile, start)
        return (sums / guard_zero(total)).astype(q.dtype), safe_max(top), guard_zero(total)

    blocks = lax.map(row, jnp.arange(tiles.rows, dtype=np.int32))
    residuals = Residuals(*map(_merge_blocks, blocks))
    return residuals.y, residuals


def _backward(
    spec: ScoreSpec, tiles: Tiles, residuals: Residuals, primals: Any, consts: ScoreInputs, grad: jax.Array
) -> tuple[Any, ...]:
    """The gradients of q, k, v, the bias and the sinks."""
    (q, k, v, bias, sinks), (y, top, total) = primals, residuals
    inputs, wide = consts._replace(bias=bias), total.dtype
    y_dot = reduce_sum(grad.astype(wide) * y.astype(wide), (4,))[..., None]  # (b, g, r, t, 1)

    def column(carry: Any, j: Any) -> Any:
        keys, values = _slice_block(k, 2, j, tiles.keys), _slice_block(v, 2, j, tiles.keys)

        def tile(i: Any, carry: Any) -> Any:
            q_grad, bias_grad, k_grad, v_grad = carry
            queries, y_grad, row_top, row_total, row_dot = (
                _slice_block(array, 3, i, tiles.queries) for array in (q, grad, top, total, y_dot)
            )
            local = _slice_inputs(inputs, tiles, i, j)
            raw, weights = _tile_weights(spec, queries, keys, local, row_top, row_total)
            v_grad = v_grad + accum_einsum("bgrts,bgrtk->bgsk", weights.astype(v.dtype), y_grad, spec)
            weight_grad = accum_einsum("bgrtk,bgsk->bgrts", y_grad, values, spec)
            score_grad = weights * (weight_grad - row_dot)
            bias_grad = _add_bias_tile(bias_grad, score_grad, tiles, i, j)
            if spec.softcap is not None:
                score_grad = score_grad * (1.0 - (raw / spec.softcap) * (raw / spec.softcap))
            score_grad = score_grad.astype(q.dtype)
            k_grad = k_grad + accum_einsum("bgrts,bgrtk->bgsk", score_grad, queries, spec)
            q_tile = accum_einsum("bgrts,bgsk->bgrtk", score_grad, keys, spec)
            return _add_block(q_grad, q_tile, 3, i * tiles.queries), bias_grad, k_grad, v_grad

        start = (*carry, jnp.zeros_like(keys, wide), jnp.zeros_like(values, wide))
        q_grad, bias_grad, k_grad, v_grad = lax.fori_loop(*_visible_query_blocks(spec, tiles, j), tile, start)
        return (q_grad, bias_grad), (k_grad.astype(k.dtype), v_grad.astype(v.dtype))

    start = (jnp.zeros_like(q, wide), None if inputs.bias is None else jnp.zeros_like(inputs.bias, wide))
    (q_grad, bias_grad), (k_grad, v_grad) = lax.scan(column, start, jnp.arange(tiles.columns, dtype=np.int32))
    sinks_grad = None
    if sinks is not None:
        weights = lax.exp(_broadcast_sinks(sinks, top) - top) / total
        sinks_grad = -reduce_sum(weights * y_dot, (0, 3, 4)).reshape(sinks.shape).astype(sinks.dtype)
    if bias_grad is not None:
        bias_grad = bias_grad.astype(q.dtype)
    return q_grad.astype(q.dtype), _merge_blocks(k_grad, 2), _merge_blocks(v_grad, 2), bias_grad, sinks_grad


def _tangent(
    spec: ScoreSpec, tiles: Tiles, residuals: Residuals, primals: Any, consts: ScoreInputs, tangents: Any
) -> jax.Array:
    """The tangent of the result, of the tangents of q, k, v, the bias and the sinks."""
    (q, k, v, bias, sinks), (y, top, total) = primals, residuals
    q_dot, k_dot, v_dot, bias_dot, sinks_dot = tangents
    inputs, wide = consts._replace(bias=bias), total.dtype

    def row(i: Any) -> jax.Array:
        queries, queries_dot, row_top, row_total = (
            _slice_block(array, 3, i, tiles.queries) for array in (q, q_dot, top, total)
        )

        def tile(j: Any, carry: Any) -> Any:
            sums, mean = carry
            keys, keys_dot, values, values_dot = (_slice_block(x, 2, j, tiles.keys) for x in (k, k_dot, v, v_dot))
            local = _slice_inputs(inputs, tiles, i, j)
            raw, weights = _tile_weights(spec, queries, keys, local, row_top, row_total)
            change = accum_einsum("bgrtk,bgsk->bgrts", queries_dot, keys, spec)
            change = change + accum_einsum("bgrtk,bgsk->bgrts", queries, keys_dot, spec)
            if spec.softcap is not None:
                change = change * (1.0 - (raw / spec.softcap) * (raw / spec.softcap))
            local_dot = _slice_inputs(inputs._replace(bias=bias_dot), tiles, i, j).bias
            if local_dot is not None:
                change = change + local_dot.astype(wide)
            change = weights * change
            sums = sums + accum_einsum("bgrts,bgsk->bgrtk", change.astype(v.dtype), values, spec)
            sums = sums + accum_einsum("bgrts,bgsk->bgrtk", weights.astype(v.dtype), values_dot, spec)
            return sums, mean + reduce_sum(change, (4,))[..., None]

        zeros = jnp.zeros_like(row_total)
        start = jnp.broadcast_to(zeros, (*zeros.shape[:-1], v.shape[-1])), zeros
        sums, mean = lax.fori_loop(*_visible_key_blocks(spec, tiles, i), tile, start)
        if sinks is not None:
            weights = lax.exp(_broadcast_sinks(sinks, row_top) - row_top) / row_total
            mean = mean + weights * _broadcast_sinks(sinks_dot, row_top)
        return sums - _slice_block(y, 3, i, tiles.queries).astype(wide) * mean

    return _merge_blocks(lax.map(row, jnp.arange(tiles.rows, dtype=np.int32))).astype(q.dtype)


def _tile_weights(
    spec: ScoreSpec, queries: jax.Array, keys: jax.Array, local: ScoreInputs, top: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The scores of a tile before biases and masks, and its attention weights, from the residuals of the softmax."""
    raw = dot_scores(queries, keys, spec)
    scores, mask = add_biases(raw, local, spec), visibility_mask(local, spec)
    if mask is not None:
        scores = jnp.where(mask, scores, min_value(total.dtype))
    return raw, lax.exp(scores - top) / total


def _visible_key_blocks(spec: ScoreSpec, tiles: Tiles, i: Any) -> tuple[Any, Any]:
    """The range of key blocks that some query of block `i` may attend to."""
    first, last = i * tiles.queries, (i + 1) * tiles.queries - 1
    behind = None if spec.window is None else spec.window - 1
    ahead = 0 if spec.causal else behind
    return _block_range(spec, first, last, behind, ahead, tiles.keys, tiles.columns)


def _visible_query_blocks(spec: ScoreSpec, tiles: Tiles, j: Any) -> tuple[Any, Any]:
    """The range of query blocks that may attend to some key of block `j`."""
    first, last = j * tiles.keys, (j + 1) * tiles.keys - 1
    ahead = None if spec.window is None else spec.window - 1
    behind = 0 if spec.causal else ahead
    return _block_range(spec, first, last, behind, ahead, tiles.queries, tiles.rows)


def _block_range(
    spec: ScoreSpec, first: Any, last: Any, behind: int | None, ahead: int | None, size: int, count: int
) -> tuple[Any, Any]:
    """The blocks that contain positions from `first - behind` to `last + ahead`; None: unbounded."""
    if not spec.ordered:
        behind = ahead = None
    begin = 0 if behind is None else jnp.clip((first - behind) // size, 0, count)
    end = count if ahead is None else jnp.clip((last + ahead) // size + 1, 0, count)
    return jnp.asarray(begin, np.int32), jnp.asarray(end, np.int32)


def _slice_block(x: jax.Array, axis: int, block: Any, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, block * size, size, axis)


def _slice_inputs(inputs: ScoreInputs, tiles: Tiles, i: Any, j: Any) -> ScoreInputs:
    """The inputs of tile (i, j); axes of size 1 stay."""

    def cut(x: Any, axis: int, block: Any, size: int) -> Any:
        return x if x is None or x.shape[axis] == 1 else _slice_block(x, axis, block, size)

    def cut_both(x: Any) -> Any:
        return cut(cut(x, 3, i, tiles.queries), 4, j, tiles.keys)

    return ScoreInputs(
        query_positions=cut(inputs.query_positions, 1, i, tiles.queries),
        key_positions=cut(inputs.key_positions, 1, j, tiles.keys),
        key_indices=cut(inputs.key_indices, 0, j, tiles.keys),
        key_limit=inputs.key_limit,
        query_segments=cut(inputs.query_segments, 1, i, tiles.queries),
        key_segments=cut(inputs.key_segments, 1, j, tiles.keys),
        mask=cut_both(inputs.mask),
        bias=cut_both(inputs.bias),
    )


def _add_bias_tile(total: jax.Array | None, tile: jax.Array, tiles: Tiles, i: Any, j: Any) -> jax.Array | None:
    """The gradient of the bias plus that of tile (i, j), summed over the axes that the bias broadcasts."""
    if total is None:
        return None
    broadcast = tuple(axis for axis in range(5) if total.shape[axis] == 1 and tile.shape[axis] != 1)
    tile = lax.expand_dims(reduce_sum(tile, broadcast), broadcast)
    zero = jnp.zeros_like(i)  # start indices are of one integer type, also with 64-bit integers enabled
    row = zero if total.shape[3] == 1 else i * tiles.queries
    column = zero if total.shape[4] == 1 else j * tiles.keys
    starts = [zero, zero, zero, row, column]
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, starts, tile.shape) + tile, starts)


def _add_block(total: jax.Array, block: jax.Array, axis: int, start: Any) -> jax.Array:
    before = lax.dynamic_slice_in_dim(total, start, block.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(total, before + block, start, axis)


def _pad_ends(x: Any, more: dict[int, int]) -> Any:
    """`x` with zeros after the end of some axes; an axis of size 1 that broadcasts stays."""
    if x is None:
        return None
    widths = [(0, more.get(axis, 0) if x.ndim < 5 or size != 1 else 0) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def _merge_blocks(blocks: jax.Array, axis: int = 3) -> jax.Array:
    """Blocks (n, ..., size, ...) concatenated along the axis `axis` of the result."""
    return lax.collapse(jnp.moveaxis(blocks, 0, axis), axis, axis + 2)


def _broadcast_sinks(sinks: jax.Array, like: jax.Array) -> jax.Array:
    """Sinks (g, r) broadcast to (b, g, r, t, 1)."""
    expanded = sinks[None, :, :, None, None].astype(like.dtype)
    return jnp.broadcast_to(expanded, like.shape, out_sharding=explicit_sharding(like))
