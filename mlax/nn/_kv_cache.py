"""The state of decoding: how many tokens came so far, and their keys and values."""

from dataclasses import KW_ONLY
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from mlax.core import DType, Layer, Size, frozen

EMPTY = np.iinfo(np.int32).max  # the position of a slot that nothing was written to: later than every query


@frozen
class Position(Layer):
    """Count tokens over calls: (b, t, ...) to the positions (t,) of its tokens, int32.

    Non_trainables: count (), the tokens so far.
    """

    def init(self, rng, x):
        return None, {"count": jnp.zeros((), np.int32)}

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        state: Any = non_trainables
        count, t = state["count"], x.shape[1]
        return count + jnp.arange(t, dtype=np.int32), {"count": count + t}


@frozen
class KeyValueCache(Layer):
    """Keep the keys and values of all tokens so far: what attention reads when it decodes.

    A dict of key and value (b, t, g, k) and their consecutive positions (t,), to a dict of the same with all that
    can still be seen: (b, s, g, k) and (s,), where slots not written to have a position after all others.
    - A whole cache has `capacity` slots. Writing beyond them is an error where the positions are known, as they are
      outside of `jit`; inside it, the values written are NaN, so that everything computed from then on shows it.
    - A `ring` keeps the last `capacity` tokens, for attention whose window is that wide, and never fills.

    Non_trainables: key and value (b, capacity, g, k), in `param_dtype`.
    """

    capacity: Size
    _: KW_ONLY
    ring: bool = False
    param_dtype: DType = None  # None: the dtype that init sees

    def init(self, rng, x):
        key, value = x["key"], x["value"]
        if not self.ring and key.shape[1] > self.capacity:
            raise ValueError(f"{self}: {key.shape[1]} tokens came at once, but there are {self.capacity} slots.")

        def empty(x):
            return jnp.zeros((x.shape[0], self.capacity, *x.shape[2:]), self.param_dtype or x.dtype)

        return None, {"key": empty(key), "value": empty(value)}

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        state: Any = non_trainables
        held = state["key"].shape
        if (held[0], *held[2:]) != (x["key"].shape[0], *x["key"].shape[2:]):
            raise ValueError(
                f"{self}: the cache is {held} but the new keys are {x['key'].shape}; batch, heads and width must be "
                "those of init. Call init on an input of this batch."
            )
        return (self._turn if self.ring else self._append)(x, state)

    def _append(self, x, state):
        positions, t = x["positions"], x["key"].shape[1]
        start, end = positions[0], positions[0] + t
        if not isinstance(end, Tracer) and int(end) > self.capacity:
            raise ValueError(f"{self}: the cache is full: token {int(end)} came, and there are {self.capacity} slots.")
        value = jnp.where(end > self.capacity, jnp.full_like(x["value"], jnp.nan), x["value"])
        new = {"key": _write(state["key"], x["key"], start), "value": _write(state["value"], value, start)}
        return {**_cast_to_inputs(new, x), "positions": jnp.arange(self.capacity, dtype=np.int32)}, new

    def _turn(self, x, state):
        """Slot i holds the last position that is i modulo the capacity."""
        positions, t = x["positions"], x["key"].shape[1]
        before, after = self._slot_positions(positions[0]), self._slot_positions(positions[0] + t)
        kept = min(t, self.capacity)
        slots = (positions[0] + jnp.arange(t - kept, t, dtype=np.int32)) % self.capacity
        new = {
            name: state[name].at[:, slots].set(x[name][:, t - kept :].astype(state[name].dtype), unique_indices=True)
            for name in ("key", "value")
        }
        if t == 1:
            return {**_cast_to_inputs(new, x), "positions": after}, new
        old = _cast_to_inputs(state, x)  # an earlier query of these sees tokens that a later one overwrites
        both = {name: jnp.concatenate([old[name], x[name]], axis=1) for name in ("key", "value")}
        return {**both, "positions": jnp.concatenate([before, positions])}, new

    def _slot_positions(self, end):
        """The position that each slot holds after `end` tokens."""
        last = end - 1
        held = last - (last - jnp.arange(self.capacity, dtype=np.int32)) % self.capacity
        return jnp.where(held < 0, EMPTY, held)


def _write(held, new, start):
    zero = jnp.zeros_like(start)
    return lax.dynamic_update_slice(held, new.astype(held.dtype), (zero, start, zero, zero))


def _cast_to_inputs(state, like):
    return {name: state[name].astype(like[name].dtype) for name in ("key", "value")}
