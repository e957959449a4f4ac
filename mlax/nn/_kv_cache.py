"""The state of decoding: how many tokens each row has seen, and their keys and values."""

from dataclasses import KW_ONLY
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax import ops
from mlax._jax import known_values, shard_like
from mlax.core import DType, Layer, Size, frozen

HEADS = ("key", "value", "key_scale", "value_scale")  # arrays with an axis of heads
EMPTY = np.iinfo(np.int32).max  # the position of an empty slot: later than every query


@frozen
class Position(Layer):
    """Count the tokens of each row over calls: (b, t, ...) to the positions (b, t) of its tokens, int32.

    The input may also be a pair of it and lengths (b,): how many tokens of each row are not padding, and so counted.
    Non-trainables: count (b,), the tokens so far; a count (1,) is that of all rows, whose positions are then (1, t).
    """

    def init(self, rng, x):
        x, _ = x if isinstance(x, tuple) else (x, None)
        return None, {"count": jnp.zeros(x.shape[0], np.int32)}

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        x, lengths = x if isinstance(x, tuple) else (x, None)
        state: Any = non_trainables
        count, t = state["count"], x.shape[1]
        after = count + (t if lengths is None else lengths.astype(np.int32))
        return count[:, None] + jnp.arange(t, dtype=np.int32)[None], {"count": after}

    def check_variables(self, x, trainables, non_trainables):
        """As of every layer, but for a count of all rows."""
        if jax.tree.map(jnp.shape, non_trainables) != {"count": (1,)}:
            super().check_variables(x, trainables, non_trainables)


@frozen
class KeyValueCache(Layer):
    """A KV cache: append keys and values to those of all tokens so far, for attention in decoding.

    A dict of key (b, t, g, k), value (b, t, g, w) and positions (t,) or (b, t), consecutive in each row, to a dict of
    the same with all that can still be attended to: (b, s, g, k), (b, s, g, w) and (b, s), where empty slots have a
    position after all others. Without positions, as in a first call, they are 0, 1, 2, ... and are not returned. It may
    also hold lengths (b,): how many tokens of each row are not padding; the rest is not stored. And segments (b, t), if
    `init` saw them: ids of packed sequences, returned for all slots.
    - A plain cache has `capacity` slots for each row. Writing beyond them is an error where the positions are known, as
      they are outside of `jit`; inside it, a value written is NaN, so that the overflow shows.
    - A `ring` buffer keeps the last `capacity` tokens, for attention with a window of that size, and never overflows.

    In a MultiHeadAttention with `cache`, tokens attend to all tokens of the cache, or to the last `window`, if that is
    fewer. Rows may have prompts of different lengths, padded at their ends: pass `lengths`, and each row continues
    where it ended; outputs of padding have no meaning. The keys of a mask or a bias are the tokens of a row in order,
    those that it does not reach visible and without a bias; there can be neither with a window below `cache`, where old
    tokens are overwritten. Segments, if any, are passed to `init` and to every call.

    Non-trainables: key and value (b, g, capacity, k), in `param_dtype`, which `dtypes.Mixed` sets to the dtype that it
    computes in; segments (b, capacity). With `param_dtype="int8"` or "float8_e4m3fn" they are quantized, with a scale
    for each token and head in the dtype that `init` sees: key_scale and value_scale (b, g, capacity).

    >>> cache, k = nn.KeyValueCache(capacity=32), jnp.ones((8, 1, 4, 16))  # one token in each of 8 rows
    >>> token = {"key": k, "value": k, "positions": jnp.zeros((8, 1), "int32")}
    >>> _, state = cache.init(jax.random.key(0), token)
    >>> tokens, state = cache.fwd(token, None, state)
    >>> tokens["key"].shape
    (8, 32, 4, 16)
    """

    stores_activations: ClassVar[bool] = True

    capacity: Size  # tokens of each row
    _: KW_ONLY
    ring: bool = False  # whether new tokens overwrite the oldest
    param_dtype: DType = None  # of keys and values; None: the dtype that init sees

    def __post_init__(self):
        if self.param_dtype is not None and not jnp.issubdtype(self.param_dtype, jnp.floating):
            ops.check_quantized_dtype("KeyValueCache", self.param_dtype)

    def init(self, rng, x):
        self._check_inputs(x)
        if not self.ring and x["key"].shape[1] > self.capacity:
            raise ValueError(f"{self}: the input has {x['key'].shape[1]} tokens, but there are {self.capacity} slots.")

        def empty(shape, dtype):
            b, _, g, *width = shape
            return jnp.zeros((b, g, self.capacity, *width), dtype)

        state = {name: empty(x[name].shape, self.param_dtype or x[name].dtype) for name in ("key", "value")}
        if self._is_quantized:
            state |= {f"{name}_scale": empty(x[name].shape[:3], x[name].dtype) for name in ("key", "value")}
        if "segments" in x:
            state["segments"] = jnp.zeros((x["segments"].shape[0], self.capacity), x["segments"].dtype)
        return None, state

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        state: Any = non_trainables
        self._check_inputs(x)
        self._check_state(x, state)
        b, t = x["key"].shape[:2]
        positions = jnp.atleast_2d(jnp.asarray(x.get("positions", ops.default_positions(t))).astype(np.int32))
        is_one_slot = positions.shape == (1, 1) and (b == 1 or "lengths" not in x)  # of all rows
        positions = jnp.broadcast_to(positions, (b, t))
        lengths = x["lengths"].astype(np.int32) if "lengths" in x else jnp.full(b, t, np.int32)
        is_token = jnp.arange(t, dtype=np.int32)[None] < lengths[:, None]
        new = _quantize({name: x[name] for name in ("key", "value", "segments") if name in state}, self.param_dtype)
        new = _swap_heads_and_time(new)
        write = _write_slot if is_one_slot else _scatter
        y, state = (self._write_ring if self.ring else self._append)(new, positions, lengths, is_token, state, write)
        y = _swap_heads_and_time(_dequantize(y, x["key"].dtype))
        y["positions"] = y["positions"][: 1 if is_one_slot else b]
        return {name: each for name, each in y.items() if name in x}, state

    def _append(self, new, positions, lengths, is_token, state, write):
        ends = positions[:, 0] + lengths  # the tokens of each row after this call
        known = known_values(ends)
        if known is not None and np.max(known, initial=0) > self.capacity:
            raise ValueError(f"{self}: the cache is full: there are {self.capacity} slots, for {known.max()} tokens.")
        marked = "value_scale" if self._is_quantized else "value"  # int8 has no NaN
        is_full = jnp.expand_dims(ends > self.capacity, range(1, new[marked].ndim))
        new = {**new, marked: jnp.where(is_full, jnp.full_like(new[marked], jnp.nan), new[marked])}
        # what does not fit goes into the last slot, where its NaN is seen
        stored = _write(write, state, new, jnp.minimum(positions, self.capacity - 1), is_token)
        slots = jnp.broadcast_to(jnp.arange(self.capacity, dtype=np.int32)[None], (positions.shape[0], self.capacity))
        return {**stored, "positions": slots}, stored

    def _write_ring(self, new, positions, lengths, is_token, state, write):
        """Slot i holds the last position that is i modulo the capacity."""
        starts = positions[:, 0]
        # of the tokens that share a slot only the last is written
        is_kept = is_token & (positions >= (starts + lengths - self.capacity)[:, None])
        stored = _write(write, state, new, positions % self.capacity, is_kept)
        if positions.shape[1] == 1:
            return {**stored, "positions": self._slot_positions(starts + lengths)}, stored
        # an earlier query attends to tokens that a later one overwrites
        both = {
            name: jnp.concatenate([old, new[name].astype(old.dtype)], axis=min(old.ndim - 1, 2))
            for name, old in state.items()
        }
        fresh = jnp.where(is_token, positions, EMPTY)
        return {**both, "positions": jnp.concatenate([self._slot_positions(starts), fresh], axis=1)}, stored

    def _slot_positions(self, ends):
        """The position (b, capacity) that each slot holds after `ends` (b,) tokens."""
        last = ends[:, None] - 1
        positions = last - (last - jnp.arange(self.capacity, dtype=np.int32)[None]) % self.capacity
        return jnp.where(positions < 0, EMPTY, positions)

    @property
    def _is_quantized(self) -> bool:
        return ops.is_quantized_dtype(self.param_dtype)

    def _check_inputs(self, x):
        names = {"key", "value", "positions", "lengths", "segments"}
        if not isinstance(x, dict) or not {"key", "value"} <= x.keys() <= names:
            has = ", ".join(x) if isinstance(x, dict) else type(x).__name__
            raise ValueError(
                f"{self}: the input has {has}, but must be a dict of key and value, and may also hold positions, "
                "lengths and segments; nn.MultiHeadAttention(heads, causal=True, cache=length) passes that itself."
            )
        for name in ("key", "value"):
            if not jnp.issubdtype(x[name].dtype, jnp.floating):
                raise TypeError(f"{self}: {name} is {x[name].dtype}, but must be floating.")
            if x[name].ndim != 4 or x[name].shape[:3] != x["key"].shape[:3]:
                raise ValueError(
                    f"{self}: key is {x['key'].shape} and value {x['value'].shape}, but they must be (batch, time, "
                    "heads, width), of equal batch, time and heads."
                )

    def _check_state(self, x, state):
        shape, key = state["key"].shape, x["key"]
        if (*shape[:2], *shape[3:]) != (key.shape[0], *key.shape[2:]):
            raise ValueError(
                f"{self}: the cache is {shape} but the new keys are {key.shape}; batch, heads and width must be "
                "those of init. Call init on an input of this batch."
            )
        b, t = key.shape[:2]
        if "positions" in x:
            ops.check_positions(str(self), x["positions"], np.iinfo(np.int32).max, (b, t))
        if "lengths" in x:
            ops.check_lengths(str(self), x["lengths"], b, t, "tokens")


@frozen
class SourceCache(Layer):
    """The keys and values of the source of cross-attention, computed once and then attended to by every query.

    A dict of query (b, t, h, k), key (b, s, g, k), value (b, s, g, w) and lengths (b,), which may be left out, to a
    dict of key, value and lengths; a later call passes the query alone, and gets what is stored.
    Non-trainables: key and value (b, g, s, k), with scales as in KeyValueCache, and lengths.
    """

    stores_activations: ClassVar[bool] = True

    _: KW_ONLY
    param_dtype: DType = None  # of keys and values; None: the dtype that init sees

    def __post_init__(self):
        if self.param_dtype is not None and not jnp.issubdtype(self.param_dtype, jnp.floating):
            ops.check_quantized_dtype("SourceCache", self.param_dtype)

    def init(self, rng, x):
        if "key" not in x:
            raise ValueError(f"{self}: init needs the source, whose keys and values are stored; pass it, too.")
        stored = jax.eval_shape(self._stored, x)
        return None, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), stored)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        state: Any = self._stored(x) if "key" in x else non_trainables
        y = _swap_heads_and_time(_dequantize(state, x["query"].dtype))
        return {name: y[name] for name in ("key", "value", "lengths")}, state

    def _stored(self, x):
        b, s = x["key"].shape[:2]
        lengths = x["lengths"].astype(np.int32) if "lengths" in x else jnp.full(b, s, np.int32)
        new = _swap_heads_and_time(_quantize({name: x[name] for name in ("key", "value")}, self.param_dtype))
        codes = {name: new[name].astype(self.param_dtype or new[name].dtype) for name in ("key", "value")}
        return {**new, **codes, "lengths": lengths}

    def check_variables(self, x, trainables, non_trainables):
        """Raise unless the state is that of a source like this one; a call without a source needs any."""
        state: Any = non_trainables
        if state is None:
            raise ValueError(f"{self}: non_trainables is None; pass those that init returned.")
        stored = jax.eval_shape(lambda state: _swap_heads_and_time(state)["key"], state).shape
        wanted = x["key"].shape if "key" in x else x["query"].shape[:1]
        if stored[: len(wanted)] != wanted:
            raise ValueError(
                f"{self}: the stored keys are {stored} but the input has {wanted}; call init on a source of this shape."
            )


def _write(write, state, new, slots, is_kept):
    """The arrays of the state with new ones in their slots (b, t), where `is_kept` (b, t) is True."""
    state, slots, is_kept = shard_like((state, slots, is_kept), new["key"])  # rows of an explicit mesh must agree
    return {name: write(array, new[name].astype(array.dtype), slots, is_kept) for name, array in state.items()}


def _scatter(array, new, slots, is_kept):
    def write_row(array: Any, new: Any, slots: Any) -> Any:
        at = array.at[slots] if array.ndim == 1 else array.at[:, slots]  # segments have no heads
        return at.set(new, mode="drop")

    size = array.shape[min(array.ndim - 1, 2)]
    return jax.vmap(write_row)(array, new, jnp.where(is_kept, slots, size))  # a slot past the end is not written


def _write_slot(array, new, slots, is_kept):
    """One new token of each row in the same slot: updated in place, where a scatter would check each index first."""
    axis, slot = min(array.ndim - 1, 2), slots[0, 0]
    old = lax.dynamic_slice_in_dim(array, slot, 1, axis)
    new = jnp.where(jnp.expand_dims(is_kept[:, 0], range(1, array.ndim)), new, old)
    return lax.dynamic_update_slice_in_dim(array, new, slot, axis)


def _swap_heads_and_time(arrays):
    """(b, t, g, ...) as (b, g, t, ...), and back: so stored, products with the slots of a head need no transpose."""
    return {name: each.swapaxes(1, 2) if name in HEADS else each for name, each in arrays.items()}


def _quantize(new, dtype):
    """The arrays as they are stored, up to a cast: with scales if the dtype is a quantized one."""
    if not ops.is_quantized_dtype(dtype):
        return new
    pairs = {name: ops.quantize(new[name], dtype) for name in ("key", "value")}
    codes, scales = ({name: pair[i] for name, pair in pairs.items()} for i in (0, 1))
    return {**new, **codes, **{f"{name}_scale": scale for name, scale in scales.items()}}


def _dequantize(stored, dtype):
    """The stored keys and values in the dtype of the computation."""
    if "key_scale" not in stored:
        return {**stored, **{name: stored[name].astype(dtype) for name in ("key", "value")}}
    pairs = {name: (stored[name], stored[f"{name}_scale"].astype(dtype)) for name in ("key", "value")}
    return {**stored, **{name: ops.dequantize(*pair) for name, pair in pairs.items()}}
