"""Attention in tiles: the softmax is gathered block by block, so no t x s array is ever held, forward or backward.

Algorithms 1 and 2 of https://arxiv.org/abs/2307.08691. Blocks that the causal spec or the window hides from each
other are not visited.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax._jax import explicit_sharding, pcast_like
from mlax.ops._activations import guard_zero, min_value, safe_max
from mlax.ops._attention_scores import ScoreInputs, ScoreSpec, accum_einsum, add_biases, dot_scores, visibility_mask

QUERY_BLOCK, KEY_BLOCK = 512, 512  # the sides of a tile


class Tiles(NamedTuple):
    """How a t x s plane is cut."""

    queries: int  # in a block
    keys: int
    rows: int  # blocks
    columns: int


def chunked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, inputs: ScoreInputs, sinks: jax.Array | None, spec: ScoreSpec
) -> jax.Array:
    """Attention of q (b, g, r, t, k), k and v (b, g, s, k): (b, g, r, t, k). Arguments as in `attend_whole`."""
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
    arrays = (q, k, v, inputs, sinks)
    y: Any = _attend_tiles(spec, tiles, *pcast_like(arrays, arrays))
    return y[:, :, :, :t]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_tiles(spec: ScoreSpec, tiles: Tiles, q: Any, k: Any, v: Any, inputs: ScoreInputs, sinks: Any) -> jax.Array:
    return _forward(spec, tiles, q, k, v, inputs, sinks)[0]


def _forward(spec: ScoreSpec, tiles: Tiles, q: Any, k: Any, v: Any, inputs: ScoreInputs, sinks: Any) -> tuple[Any, Any]:
    wide = jnp.dtype(spec.accum_dtype or q.dtype)

    def row(i: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        block = _slice_block(q, 3, i, tiles.queries)

        def tile(j: Any, carry: Any) -> Any:
            top, total, sums = carry
            here = _slice_inputs(inputs, tiles, i, j)
            scores = add_biases(dot_scores(block, _slice_block(k, 2, j, tiles.keys), spec), here, spec)
            seen = visibility_mask(here, spec)
            if seen is not None:
                scores = jnp.where(seen, scores, min_value(wide))
            new = jnp.maximum(top, lax.reduce_max(scores, (4,))[..., None])
            weights, fading = lax.exp(scores - safe_max(new)), lax.exp(top - safe_max(new))
            total = total * fading + lax.reduce_sum(weights, (4,))[..., None]
            gained = accum_einsum("bgrts,bgsk->bgrtk", weights.astype(v.dtype), _slice_block(v, 2, j, tiles.keys), spec)
            return new, total, sums * fading + gained

        none = jnp.zeros_like(block[..., :1], wide)
        start = (
            # a sink is an entry that comes before all keys and whose value is 0
            jnp.full_like(none, min_value(wide)) if sinks is None else _broadcast_sinks(sinks, none),
            none if sinks is None else jnp.ones_like(none),
            jnp.broadcast_to(none, (*none.shape[:-1], v.shape[-1])),
        )
        top, total, sums = lax.fori_loop(*_visible_key_blocks(spec, tiles, i), tile, start)
        return (sums / guard_zero(total)).astype(q.dtype), safe_max(top), guard_zero(total)

    y, top, total = (_merge_blocks(blocks) for blocks in lax.map(row, jnp.arange(tiles.rows, dtype=np.int32)))
    return y, (q, k, v, inputs, sinks, y, top, total)


def _backward(spec: ScoreSpec, tiles: Tiles, saved: Any, grad: jax.Array) -> tuple[Any, ...]:
    q, k, v, inputs, sinks, y, top, total = saved
    wide = total.dtype
    shared = lax.reduce_sum(grad.astype(wide) * y.astype(wide), (4,))[..., None]  # (b, g, r, t, 1)

    def column(carry: Any, j: Any) -> Any:
        keys, values = _slice_block(k, 2, j, tiles.keys), _slice_block(v, 2, j, tiles.keys)

        def tile(i: Any, carry: Any) -> Any:
            by_q, by_bias, by_k, by_v = carry
            block, given = _slice_block(q, 3, i, tiles.queries), _slice_block(grad, 3, i, tiles.queries)
            here = _slice_inputs(inputs, tiles, i, j)
            raw = dot_scores(block, keys, spec)
            scores, seen = add_biases(raw, here, spec), visibility_mask(here, spec)
            if seen is not None:
                scores = jnp.where(seen, scores, min_value(wide))
            weights = lax.exp(scores - _slice_block(top, 3, i, tiles.queries)) / _slice_block(
                total, 3, i, tiles.queries
            )
            by_v = by_v + accum_einsum("bgrts,bgrtk->bgsk", weights.astype(v.dtype), given, spec)
            by_weights = accum_einsum("bgrtk,bgsk->bgrts", given, values, spec)
            by_scores = weights * (by_weights - _slice_block(shared, 3, i, tiles.queries))
            by_bias = _add_bias_tile(by_bias, by_scores, tiles, i, j)
            if spec.softcap is not None:
                by_scores = by_scores * (1.0 - (raw / spec.softcap) * (raw / spec.softcap))
            by_scores = by_scores.astype(q.dtype)
            by_k = by_k + accum_einsum("bgrts,bgrtk->bgsk", by_scores, block, spec)
            by_q = _add_block(by_q, accum_einsum("bgrts,bgsk->bgrtk", by_scores, keys, spec), 3, i * tiles.queries)
            return by_q, by_bias, by_k, by_v

        start = (*carry, jnp.zeros_like(keys, wide), jnp.zeros_like(values, wide))
        by_q, by_bias, by_k, by_v = lax.fori_loop(*_visible_query_blocks(spec, tiles, j), tile, start)
        return (by_q, by_bias), (by_k.astype(k.dtype), by_v.astype(v.dtype))

    start = (jnp.zeros_like(q, wide), None if inputs.bias is None else jnp.zeros_like(inputs.bias, wide))
    (by_q, by_bias), (by_k, by_v) = lax.scan(column, start, jnp.arange(tiles.columns, dtype=np.int32))
    by_sinks = None
    if sinks is not None:
        weights = lax.exp(_broadcast_sinks(sinks, top) - top) / total
        by_sinks = -lax.reduce_sum(weights * shared, (0, 3, 4)).reshape(sinks.shape).astype(sinks.dtype)
    by_inputs: Any = jax.tree.map(lambda x: None, inputs)  # whole numbers and booleans have no gradient
    if by_bias is not None:
        by_inputs = by_inputs._replace(bias=by_bias.astype(q.dtype))
    return by_q.astype(q.dtype), _merge_blocks(by_k, 2), _merge_blocks(by_v, 2), by_inputs, by_sinks


_attend_tiles.defvjp(_forward, _backward)


def _visible_key_blocks(spec: ScoreSpec, tiles: Tiles, i: Any) -> tuple[Any, Any]:
    """The blocks of keys, from and up to, that some query of block `i` may see."""
    first, last = i * tiles.queries, (i + 1) * tiles.queries - 1
    ahead = 0 if spec.causal else None if spec.window is None else spec.window - 1
    behind = None if spec.window is None else spec.window - 1
    return _block_range(spec, first, last, behind, ahead, tiles.keys, tiles.columns)


def _visible_query_blocks(spec: ScoreSpec, tiles: Tiles, j: Any) -> tuple[Any, Any]:
    """The blocks of queries, from and up to, that may see some key of block `j`."""
    first, last = j * tiles.keys, (j + 1) * tiles.keys - 1
    behind = 0 if spec.causal else None if spec.window is None else spec.window - 1
    ahead = None if spec.window is None else spec.window - 1
    return _block_range(spec, first, last, behind, ahead, tiles.queries, tiles.rows)


def _block_range(
    spec: ScoreSpec, first: Any, last: Any, behind: Any, ahead: Any, size: int, count: int
) -> tuple[Any, Any]:
    if not spec.ordered:
        behind = ahead = None
    begin = 0 if behind is None else jnp.clip((first - behind) // size, 0, count)
    end = count if ahead is None else jnp.clip((last + ahead) // size + 1, 0, count)
    return jnp.asarray(begin, np.int32), jnp.asarray(end, np.int32)


def _slice_block(x: jax.Array, axis: int, block: Any, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, block * size, size, axis)


def _slice_inputs(inputs: ScoreInputs, tiles: Tiles, i: Any, j: Any) -> ScoreInputs:
    def cut(x: Any, axis: int, block: Any, size: int) -> Any:
        return x if x is None or x.shape[axis] == 1 else _slice_block(x, axis, block, size)

    def plane(x: Any) -> Any:
        return cut(cut(x, 3, i, tiles.queries), 4, j, tiles.keys)

    return ScoreInputs(
        query_positions=cut(inputs.query_positions, 1, i, tiles.queries),
        key_positions=cut(inputs.key_positions, 1, j, tiles.keys),
        key_indices=cut(inputs.key_indices, 0, j, tiles.keys),
        key_limit=inputs.key_limit,
        query_segments=cut(inputs.query_segments, 1, i, tiles.queries),
        key_segments=cut(inputs.key_segments, 1, j, tiles.keys),
        mask=plane(inputs.mask),
        bias=plane(inputs.bias),
    )


def _add_bias_tile(total: jax.Array | None, tile: jax.Array, tiles: Tiles, i: Any, j: Any) -> jax.Array | None:
    """The gradient by the bias with one tile's share added, summed over the axes that the bias broadcasts."""
    if total is None:
        return None
    shared = tuple(axis for axis in range(5) if total.shape[axis] == 1 and tile.shape[axis] != 1)
    tile = lax.expand_dims(lax.reduce_sum(tile, shared), shared)
    starts = [0, 0, 0, 0 if total.shape[3] == 1 else i * tiles.queries, 0 if total.shape[4] == 1 else j * tiles.keys]
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, starts, tile.shape) + tile, starts)


def _add_block(total: jax.Array, part: jax.Array, axis: int, start: Any) -> jax.Array:
    before = lax.dynamic_slice_in_dim(total, start, part.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(total, before + part, start, axis)


def _pad_ends(x: Any, more: dict[int, int]) -> Any:
    """The array with zeros after its end along some axes; an axis of size 1 that broadcasts stays."""
    if x is None:
        return None
    widths = [(0, more.get(axis, 0) if x.ndim < 5 or size != 1 else 0) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def _merge_blocks(blocks: jax.Array, axis: int = 3) -> jax.Array:
    """Blocks (n, ..., size, ...) one after the other along the axis `axis` of the result."""
    moved = jnp.moveaxis(blocks, 0, axis)
    return lax.collapse(moved, axis, axis + 2)


def _broadcast_sinks(sinks: jax.Array, like: jax.Array) -> jax.Array:
    """Sinks (g, r) spread over (b, g, r, t, 1)."""
    spread = sinks[:, :, None, None].astype(like.dtype)
    return jnp.broadcast_to(spread, like.shape, out_sharding=explicit_sharding(like))
