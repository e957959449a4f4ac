"""The state of decoding: how many tokens have been seen, and their keys and values."""

from dataclasses import KW_ONLY
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from mlax.core import DType, Layer, Size, frozen

EMPTY = np.iinfo(np.int32).max  # the position of an empty slot: later than every query


@frozen
class Position(Layer):
    """Count tokens over calls: (b, t, ...) to the positions (t,) of its tokens, int32.

    Non-trainables: count (), the tokens so far.
    """

    def init(self, rng, x):
        return None, {"count": jnp.zeros((), np.int32)}

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        state: Any = non_trainables
        count, t = state["count"], x.shape[1]
        return count + jnp.arange(t, dtype=np.int32), {"count": count + t}


@frozen
class KeyValueCache(Layer):
    """Append keys and values to those of all tokens so far, for attention in decoding.

    A dict of key and value (b, t, g, k) and their consecutive positions (t,), to a dict of the same with all that
    can still be attended to: (b, s, g, k) and (s,), where empty slots have a position after all others.
    - A plain cache has `capacity` slots. Writing beyond them is an error where the positions are concrete, as they are
      outside of `jit`; inside it, the values written are NaN, so that the overflow shows.
    - A `ring` buffer keeps the last `capacity` tokens, for attention with a window of that size, and never overflows.

    Non-trainables: key and value (b, capacity, g, k), in `param_dtype`.
    """

    capacity: Size
    _: KW_ONLY
    ring: bool = False
    param_dtype: DType = None  # None: the dtype that init sees

    def init(self, rng, x):
        key, value = x["key"], x["value"]
        if not self.ring and key.shape[1] > self.capacity:
            raise ValueError(f"{self}: the input has {key.shape[1]} tokens, but there are {self.capacity} slots.")

        def empty(x):
            return jnp.zeros((x.shape[0], self.capacity, *x.shape[2:]), self.param_dtype or x.dtype)

        return None, {"key": empty(key), "value": empty(value)}

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        state: Any = non_trainables
        shape = state["key"].shape
        if (shape[0], *shape[2:]) != (x["key"].shape[0], *x["key"].shape[2:]):
            raise ValueError(
                f"{self}: the cache is {shape} but the new keys are {x['key'].shape}; batch, heads and width must be "
                "those of init. Call init on an input of this batch."
            )
        return (self._write_ring if self.ring else self._append)(x, state)

    def _append(self, x, state):
        positions, t = x["positions"], x["key"].shape[1]
        start, end = positions[0], positions[0] + t
        if not isinstance(end, Tracer) and int(end) > self.capacity:
            raise ValueError(f"{self}: the cache is full: there are {self.capacity} slots, for {int(end)} tokens.")
        value = jnp.where(end > self.capacity, jnp.full_like(x["value"], jnp.nan), x["value"])
        new = {"key": _write(state["key"], x["key"], start), "value": _write(state["value"], value, start)}
        return {**_cast_to_inputs(new, x), "positions": jnp.arange(self.capacity, dtype=np.int32)}, new

    def _write_ring(self, x, state):
        """Slot i holds the last position that is i modulo the capacity."""
        positions, t = x["positions"], x["key"].shape[1]
        before, after = self._slot_positions(positions[0]), self._slot_positions(positions[0] + t)
        last = min(t, self.capacity)
        slots = (positions[0] + jnp.arange(t - last, t, dtype=np.int32)) % self.capacity
        new = {
            name: state[name].at[:, slots].set(x[name][:, t - last :].astype(state[name].dtype), unique_indices=True)
            for name in ("key", "value")
        }
        if t == 1:
            return {**_cast_to_inputs(new, x), "positions": after}, new
        old = _cast_to_inputs(state, x)  # an earlier query attends to tokens that a later one overwrites
        both = {name: jnp.concatenate([old[name], x[name]], axis=1) for name in ("key", "value")}
        return {**both, "positions": jnp.concatenate([before, positions])}, new

    def _slot_positions(self, end):
        """The position that each slot holds after `end` tokens."""
        last = end - 1
        positions = last - (last - jnp.arange(self.capacity, dtype=np.int32)) % self.capacity
        return jnp.where(positions < 0, EMPTY, positions)


def _write(cache, new, start):
    zero = jnp.zeros_like(start)
    return lax.dynamic_update_slice(cache, new.astype(cache.dtype), (zero, start, zero, zero))


def _cast_to_inputs(state, x):
    return {name: state[name].astype(x[name].dtype) for name in ("key", "value")}
