"""Learned and sinusoidal positions, added to the input."""

from dataclasses import KW_ONLY

import jax
import jax.numpy as jnp
import numpy as np

from mlax._jax import named_key
from mlax.core import DType, Initializer, Layer, Normal, Size, frozen
from mlax.dtypes import cast
from mlax.ops import embed, is_known, sinusoids


@frozen
class LearnedPositions(Layer):
    """Add a learned vector for each position: (b, t, d) to (b, t, d), in the dtype of the input.

    Positions count from 0; the input may also be a pair of it and its positions, (t,) or (b, t). A position that
    is not below `length` is an error where it is known while tracing, or else gives NaN.
    Trainables: table (length, d). With `decoding`, non_trainables: count (), the tokens so far, where the next call
    goes on.
    """

    length: Size
    _: KW_ONLY
    decoding: bool = False
    table_init: Initializer = Normal(0.02)
    param_dtype: DType = None  # None: the input's own

    def init(self, rng, x):
        x, _ = _parts(self, x)
        if is_known(x.shape[1]) and x.shape[1] > self.length:
            raise ValueError(f"{self}: the input {x.shape} is {x.shape[1]} long; pass a length of at least that.")
        table = self.table_init(named_key(rng, "table"), (self.length, x.shape[-1]), self.param_dtype or x.dtype)
        return {"table": table}, _count(self)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        x, positions = _parts(self, x)
        positions, non_trainables = _positions(x, positions, non_trainables)
        return x + embed(positions, cast(trainables["table"], x.dtype)), non_trainables


@frozen
class SinusoidalPositions(Layer):
    """Add sines and cosines of each position: (b, t, d) to (b, t, d), in the dtype of the input.

    Positions count from 0; the input may also be a pair of it and its positions, (t,) or (b, t).
    With `decoding`, non_trainables: count (), the tokens so far, where the next call goes on.
    https://arxiv.org/abs/1706.03762, section 3.5.
    """

    _: KW_ONLY
    base: float = 10_000.0
    decoding: bool = False

    def init(self, rng, x):
        x, _ = _parts(self, x)
        if x.shape[-1] % 2:
            raise ValueError(f"{self}: the input {x.shape} is {x.shape[-1]} wide, but the width must be even.")
        return None, _count(self)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        x, positions = _parts(self, x)
        positions, non_trainables = _positions(x, positions, non_trainables)
        return x + sinusoids(positions, x.shape[-1], x.dtype, base=self.base), non_trainables


def _parts(layer, x):
    """The input and its positions, if they are given."""
    x, positions = x if isinstance(x, tuple) else (x, None)
    if x.ndim != 3:
        raise ValueError(f"{layer}: the input has the shape {x.shape}, but must be (batch, time, width).")
    if positions is not None and layer.decoding:
        raise ValueError(f"{layer}: it counts positions itself when decoding; pass the input alone.")
    return x, positions


def _count(layer):
    return {"count": jnp.zeros((), np.int32)} if layer.decoding else None


def _positions(x: jax.Array, given, state):
    """The position of each token, and the state after them."""
    if given is not None:
        return given, state
    positions = jnp.arange(x.shape[1], dtype=np.int32)
    if state is None:
        return positions, None
    return state["count"] + positions, {"count": state["count"] + x.shape[1]}
