"""Attention in tiles: the softmax is gathered block by block, so no t x s array is ever held, forward or backward.

Algorithms 1 and 2 of https://arxiv.org/abs/2307.08691. Blocks that the causal rule or the window hides from each
other are not visited.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax._jax import explicit_sharding, pcast_like
from mlax.ops._attention_scores import Rule, Sight, biased, product, raw_scores, visible
from mlax.ops._softmax import lowest, nonzero, settled

QUERIES, KEYS = 512, 512  # the sides of a tile


class Tiles(NamedTuple):
    """How a t x s plane is cut."""

    queries: int  # in a block
    keys: int
    rows: int  # blocks
    columns: int


def attend_chunked(
    q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight, sinks: jax.Array | None, rule: Rule
) -> jax.Array:
    """Attention of q (b, g, r, t, k), k and v (b, g, s, k): (b, g, r, t, k). Arguments as in `attend_whole`."""
    t, s = q.shape[3], k.shape[2]
    tiles = Tiles(min(QUERIES, t), min(KEYS, s), -(-t // QUERIES), -(-s // KEYS))
    more_t, more_s = tiles.queries * tiles.rows - t, tiles.keys * tiles.columns - s
    if more_s and sight.key_limit is None:
        sight = sight._replace(key_limit=jnp.full(1, s, np.int32))
    sight = Sight(
        query_positions=_padded(sight.query_positions, {1: more_t}),
        key_positions=_padded(sight.key_positions, {1: more_s}),
        key_indices=lax.iota(np.int32, s + more_s),
        key_limit=None if sight.key_limit is None else jnp.minimum(sight.key_limit, s),
        query_segments=_padded(sight.query_segments, {1: more_t}),
        key_segments=_padded(sight.key_segments, {1: more_s}),
        mask=_padded(sight.mask, {3: more_t, 4: more_s}),
        bias=_padded(sight.bias, {3: more_t, 4: more_s}),
    )
    q, k, v = _padded(q * rule.scale, {3: more_t}), _padded(k, {2: more_s}), _padded(v, {2: more_s})
    arrays = (q, k, v, sight, sinks)
    y: Any = _attend(rule, tiles, *pcast_like(arrays, arrays))
    return y[:, :, :, :t]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(rule: Rule, tiles: Tiles, q: Any, k: Any, v: Any, sight: Sight, sinks: Any) -> jax.Array:
    return _forward(rule, tiles, q, k, v, sight, sinks)[0]


def _forward(rule: Rule, tiles: Tiles, q: Any, k: Any, v: Any, sight: Sight, sinks: Any) -> tuple[Any, Any]:
    wide = jnp.dtype(rule.accum_dtype or q.dtype)

    def row(i: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        block = _cut(q, 3, i, tiles.queries)

        def tile(j: Any, carry: Any) -> Any:
            top, total, sums = carry
            here = _cut_sight(sight, tiles, i, j)
            scores = biased(raw_scores(block, _cut(k, 2, j, tiles.keys), rule), here, rule)
            seen = visible(here, rule)
            if seen is not None:
                scores = jnp.where(seen, scores, lowest(wide))
            new = jnp.maximum(top, lax.reduce_max(scores, (4,))[..., None])
            weights, fading = lax.exp(scores - settled(new)), lax.exp(top - settled(new))
            total = total * fading + lax.reduce_sum(weights, (4,))[..., None]
            gained = product("bgrts,bgsk->bgrtk", weights.astype(v.dtype), _cut(v, 2, j, tiles.keys), rule)
            return new, total, sums * fading + gained

        none = jnp.zeros_like(block[..., :1], wide)
        start = (
            # a sink is an entry that comes before all keys and whose value is 0
            jnp.full_like(none, lowest(wide)) if sinks is None else _like_scores(sinks, none),
            none if sinks is None else jnp.ones_like(none),
            jnp.broadcast_to(none, (*none.shape[:-1], v.shape[-1])),
        )
        top, total, sums = lax.fori_loop(*_columns_seen(rule, tiles, i), tile, start)
        return (sums / nonzero(total)).astype(q.dtype), settled(top), nonzero(total)

    y, top, total = (_joined(blocks) for blocks in lax.map(row, jnp.arange(tiles.rows, dtype=np.int32)))
    return y, (q, k, v, sight, sinks, y, top, total)


def _backward(rule: Rule, tiles: Tiles, saved: Any, grad: jax.Array) -> tuple[Any, ...]:
    q, k, v, sight, sinks, y, top, total = saved
    wide = total.dtype
    shared = lax.reduce_sum(grad.astype(wide) * y.astype(wide), (4,))[..., None]  # (b, g, r, t, 1)

    def column(carry: Any, j: Any) -> Any:
        keys, values = _cut(k, 2, j, tiles.keys), _cut(v, 2, j, tiles.keys)

        def tile(i: Any, carry: Any) -> Any:
            by_q, by_bias, by_k, by_v = carry
            block, given = _cut(q, 3, i, tiles.queries), _cut(grad, 3, i, tiles.queries)
            here = _cut_sight(sight, tiles, i, j)
            raw = raw_scores(block, keys, rule)
            scores, seen = biased(raw, here, rule), visible(here, rule)
            if seen is not None:
                scores = jnp.where(seen, scores, lowest(wide))
            weights = lax.exp(scores - _cut(top, 3, i, tiles.queries)) / _cut(total, 3, i, tiles.queries)
            by_v = by_v + product("bgrts,bgrtk->bgsk", weights.astype(v.dtype), given, rule)
            by_weights = product("bgrtk,bgsk->bgrts", given, values, rule)
            by_scores = weights * (by_weights - _cut(shared, 3, i, tiles.queries))
            by_bias = _added_tile(by_bias, by_scores, tiles, i, j)
            if rule.softcap is not None:
                by_scores = by_scores * (1.0 - (raw / rule.softcap) * (raw / rule.softcap))
            by_scores = by_scores.astype(q.dtype)
            by_k = by_k + product("bgrts,bgrtk->bgsk", by_scores, block, rule)
            by_q = _added(by_q, product("bgrts,bgsk->bgrtk", by_scores, keys, rule), 3, i * tiles.queries)
            return by_q, by_bias, by_k, by_v

        start = (*carry, jnp.zeros_like(keys, wide), jnp.zeros_like(values, wide))
        by_q, by_bias, by_k, by_v = lax.fori_loop(*_rows_seeing(rule, tiles, j), tile, start)
        return (by_q, by_bias), (by_k.astype(k.dtype), by_v.astype(v.dtype))

    start = (jnp.zeros_like(q, wide), None if sight.bias is None else jnp.zeros_like(sight.bias, wide))
    (by_q, by_bias), (by_k, by_v) = lax.scan(column, start, jnp.arange(tiles.columns, dtype=np.int32))
    by_sinks = None
    if sinks is not None:
        weights = lax.exp(_like_scores(sinks, top) - top) / total
        by_sinks = -lax.reduce_sum(weights * shared, (0, 3, 4)).reshape(sinks.shape).astype(sinks.dtype)
    by_sight: Any = jax.tree.map(lambda x: None, sight)  # whole numbers and booleans have no gradient
    if by_bias is not None:
        by_sight = by_sight._replace(bias=by_bias.astype(q.dtype))
    return by_q.astype(q.dtype), _joined(by_k, 2), _joined(by_v, 2), by_sight, by_sinks


_attend.defvjp(_forward, _backward)


def _columns_seen(rule: Rule, tiles: Tiles, i: Any) -> tuple[Any, Any]:
    """The blocks of keys, from and up to, that some query of block `i` may see."""
    first, last = i * tiles.queries, (i + 1) * tiles.queries - 1
    ahead = 0 if rule.causal else None if rule.window is None else rule.window - 1
    behind = None if rule.window is None else rule.window - 1
    return _blocks(rule, first, last, behind, ahead, tiles.keys, tiles.columns)


def _rows_seeing(rule: Rule, tiles: Tiles, j: Any) -> tuple[Any, Any]:
    """The blocks of queries, from and up to, that may see some key of block `j`."""
    first, last = j * tiles.keys, (j + 1) * tiles.keys - 1
    behind = 0 if rule.causal else None if rule.window is None else rule.window - 1
    ahead = None if rule.window is None else rule.window - 1
    return _blocks(rule, first, last, behind, ahead, tiles.queries, tiles.rows)


def _blocks(rule: Rule, first: Any, last: Any, behind: Any, ahead: Any, size: int, count: int) -> tuple[Any, Any]:
    if not rule.ordered:
        behind = ahead = None
    begin = 0 if behind is None else jnp.clip((first - behind) // size, 0, count)
    end = count if ahead is None else jnp.clip((last + ahead) // size + 1, 0, count)
    return jnp.asarray(begin, np.int32), jnp.asarray(end, np.int32)


def _cut(x: jax.Array, axis: int, block: Any, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, block * size, size, axis)


def _cut_sight(sight: Sight, tiles: Tiles, i: Any, j: Any) -> Sight:
    def cut(x: Any, axis: int, block: Any, size: int) -> Any:
        return x if x is None or x.shape[axis] == 1 else _cut(x, axis, block, size)

    def plane(x: Any) -> Any:
        return cut(cut(x, 3, i, tiles.queries), 4, j, tiles.keys)

    return Sight(
        query_positions=cut(sight.query_positions, 1, i, tiles.queries),
        key_positions=cut(sight.key_positions, 1, j, tiles.keys),
        key_indices=cut(sight.key_indices, 0, j, tiles.keys),
        key_limit=sight.key_limit,
        query_segments=cut(sight.query_segments, 1, i, tiles.queries),
        key_segments=cut(sight.key_segments, 1, j, tiles.keys),
        mask=plane(sight.mask),
        bias=plane(sight.bias),
    )


def _added_tile(total: jax.Array | None, tile: jax.Array, tiles: Tiles, i: Any, j: Any) -> jax.Array | None:
    """The gradient by the bias with one tile's share added, summed over the axes that the bias broadcasts."""
    if total is None:
        return None
    shared = tuple(axis for axis in range(5) if total.shape[axis] == 1 and tile.shape[axis] != 1)
    tile = lax.expand_dims(lax.reduce_sum(tile, shared), shared)
    starts = [0, 0, 0, 0 if total.shape[3] == 1 else i * tiles.queries, 0 if total.shape[4] == 1 else j * tiles.keys]
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, starts, tile.shape) + tile, starts)


def _added(total: jax.Array, part: jax.Array, axis: int, start: Any) -> jax.Array:
    before = lax.dynamic_slice_in_dim(total, start, part.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(total, before + part, start, axis)


def _padded(x: Any, more: dict[int, int]) -> Any:
    """The array with zeros after its end along some axes; an axis of size 1 that broadcasts stays."""
    if x is None:
        return None
    widths = [(0, more.get(axis, 0) if x.ndim < 5 or size != 1 else 0) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def _joined(blocks: jax.Array, axis: int = 3) -> jax.Array:
    """Blocks (n, ..., size, ...) one after the other along the axis `axis` of the result."""
    moved = jnp.moveaxis(blocks, 0, axis)
    return lax.collapse(moved, axis, axis + 2)


def _like_scores(sinks: jax.Array, like: jax.Array) -> jax.Array:
    """Sinks (g, r) spread over (b, g, r, t, 1)."""
    spread = sinks[:, :, None, None].astype(like.dtype)
    return jnp.broadcast_to(spread, like.shape, out_sharding=explicit_sharding(like))
