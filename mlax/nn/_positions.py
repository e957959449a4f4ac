"""Position embeddings: learned, sinusoidal, rotary and relative."""

import abc
from dataclasses import KW_ONLY
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mlax import ops
from mlax._jax import expand_last, named_key
from mlax.core import DType, Initializer, Layer, Normal, Size, frozen
from mlax.dtypes import cast


@frozen
class LearnedPositions(Layer):
    """Learned position embeddings, added to the input: (b, t, d) to (b, t, d), in the dtype of the input.

    Positions are 0, 1, 2, ...; the input may also be a pair of it and its positions, (t,) or (b, t). An input
    longer than `length` is an error, and a position past it gives NaN.
    Trainables: table (length, d). With `decoding`, non-trainables: count (), the tokens so far, from which the next
    call continues.
    """

    length: Size
    _: KW_ONLY
    decoding: bool = False
    table_init: Initializer = Normal(0.02)
    param_dtype: DType = None  # None: the input's

    def init(self, rng, x):
        x, _ = _split_positions(self, x)
        if ops.is_static(x.shape[1]) and x.shape[1] > self.length:
            raise ValueError(f"{self}: the input {x.shape} is {x.shape[1]} long; pass a length of at least that.")
        table = self.table_init(named_key(rng, "table"), (self.length, x.shape[-1]), self.param_dtype or x.dtype)
        return {"table": table}, _init_count(self)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        x, positions = _split_positions(self, x)
        positions, non_trainables = _next_positions(x, positions, non_trainables)
        return x + expand_last(ops.embedding(positions, cast(trainables["table"], x.dtype)), x), non_trainables


@frozen
class SinusoidalPositions(Layer):
    """Sinusoidal position embeddings, added to the input: (b, t, d) to (b, t, d), in the dtype of the input.

    Positions are 0, 1, 2, ...; the input may also be a pair of it and its positions, (t,) or (b, t).
    With `decoding`, non-trainables: count (), the tokens so far, from which the next call continues.
    https://arxiv.org/abs/1706.03762, section 3.5.
    """

    needs_floating_input: ClassVar[bool] = True

    _: KW_ONLY
    base: float = 10_000.0
    decoding: bool = False

    def init(self, rng, x):
        x, _ = _split_positions(self, x)
        if x.shape[-1] % 2:
            raise ValueError(f"{self}: the input {x.shape} is {x.shape[-1]} wide, but the width must be even.")
        return None, _init_count(self)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        x, positions = _split_positions(self, x)
        positions, non_trainables = _next_positions(x, positions, non_trainables)
        return x + expand_last(ops.sinusoids(positions, x.shape[-1], x.dtype, base=self.base), x), non_trainables


@frozen
class RotaryScaling(abc.ABC):
    """How rotary frequencies change for contexts longer than those in training."""

    @abc.abstractmethod
    def frequencies(self, width: int, base: float) -> tuple[float, ...]:
        """The frequencies of `width` features."""


@frozen
class LinearScaling(RotaryScaling):
    """Linear scaling of rotary frequencies, all divided by `factor`. https://arxiv.org/abs/2306.15595, equation 4."""

    factor: float

    def frequencies(self, width, base):
        return ops.linear_frequencies(ops.rotary_frequencies(width, base), self.factor)


@frozen
class NTKScaling(RotaryScaling):
    """NTK-aware scaling of rotary frequencies by a larger base: the highest stays, the lowest is divided by `factor`.

    https://arxiv.org/abs/2309.00071.
    """

    factor: float

    def frequencies(self, width, base):
        return ops.ntk_frequencies(width, base, self.factor)


@frozen
class Llama3Scaling(RotaryScaling):
    """Llama 3.1's scaling of rotary frequencies: low ones are divided by `factor`, high ones stay.

    A frequency is low with fewer than `low` periods in `length` positions, and high with more than `high`.
    https://arxiv.org/abs/2407.21783
    """

    _: KW_ONLY
    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    length: int = 8192

    def frequencies(self, width, base):
        frequencies = ops.rotary_frequencies(width, base)
        return ops.llama3_frequencies(frequencies, self.factor, self.low, self.high, self.length)


@frozen
class Rotary(Layer):
    """Rotary position embeddings (RoPE): rotate pairs of features by angles proportional to the position.

    (b, t, h, k) to the same, in the dtype of the input. Positions are 0, 1, 2, ...; the input may also be a pair of it
    and its positions, (t,) or (b, t). The first `width`
    features, all unless given, are rotated. `interleaved` pairs neighbors, as GPT-J does, and otherwise halves, as
    Llama and GPT-NeoX do. https://arxiv.org/abs/2104.09864, equation 34.
    """

    needs_floating_input: ClassVar[bool] = True

    _: KW_ONLY
    base: float = 10_000.0
    width: int | None = None
    scaling: RotaryScaling | None = None
    interleaved: bool = False

    def __post_init__(self):
        if self.width is not None and (not isinstance(self.width, int) or self.width < 2 or self.width % 2):
            raise ValueError(
                f"Rotary: width is {self.width!r}, but must be an even integer, since features are rotated in pairs."
            )

    def init(self, rng, x):
        x, positions = x if isinstance(x, tuple) else (x, None)
        _check_positions(self, positions)
        if x.ndim != 4:
            raise ValueError(f"{self}: the input has the shape {x.shape}, but must be (batch, time, heads, width).")
        width = x.shape[-1] if self.width is None else self.width
        if width % 2:
            raise ValueError(
                f"{self}: the input {x.shape} has heads of width {width}, which is odd, but features are rotated in "
                "pairs; make it even, or rotate an even number of them with width=."
            )
        if width > x.shape[-1]:
            raise ValueError(f"{self}: the input {x.shape} has heads of width {x.shape[-1]} only.")
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        x, positions = x if isinstance(x, tuple) else (x, None)
        width = x.shape[-1] if self.width is None else self.width
        if self.scaling is None:
            frequencies = ops.rotary_frequencies(width, self.base)
        else:
            frequencies = self.scaling.frequencies(width, self.base)
        return ops.rotary(x, positions, frequencies=frequencies, interleaved=self.interleaved), non_trainables


@frozen
class RelativeBias(Layer):
    """Relative position bias, as in T5: a learned bias for the distance between each query and key.

    A pair of positions, integers (b, t) and (b, s), to a bias (b, heads, t, s), in the table's dtype.
    Trainables: table (buckets, heads). https://arxiv.org/abs/1910.10683, section 2.1.
    """

    heads: Size
    _: KW_ONLY
    buckets: Size = 32
    farthest: int = 128  # distance from which all share the last bucket
    bidirectional: bool = True  # False for decoders: keys ahead count as distance 0
    table_init: Initializer = Normal(0.02)
    param_dtype: DType = "float32"  # the input has no floating dtype to follow

    def init(self, rng, x):
        if not isinstance(x, tuple) or len(x) != 2 or any(each.ndim != 2 or each.dtype.kind not in "iu" for each in x):
            raise TypeError(f"{self}: the input is {x}, but must be a pair of integers, (batch, t) and (batch, s).")
        table = self.table_init(named_key(rng, "table"), (self.buckets, self.heads), self.param_dtype)
        return {"table": table}, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        queries, keys = x
        table = trainables["table"]
        y = ops.relative_bias(queries, keys, table, bidirectional=self.bidirectional, farthest=self.farthest)
        return y, non_trainables


def _split_positions(layer: Any, x: Any) -> tuple[Any, Any]:
    """The input, and its positions or None."""
    x, positions = x if isinstance(x, tuple) else (x, None)
    if x.ndim != 3:
        raise ValueError(f"{layer}: the input has the shape {x.shape}, but must be (batch, time, width).")
    _check_positions(layer, positions)
    if positions is not None and layer.decoding:
        raise ValueError(f"{layer}: it counts positions itself when decoding; pass the input alone.")
    return x, positions


def _check_positions(layer: Any, positions: Any) -> None:
    if positions is not None and not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"{layer}: the positions are {positions.dtype}, but must be integers; cast them to int32.")


def _init_count(layer: Any) -> dict[str, jax.Array] | None:
    return {"count": jnp.zeros((), np.int32)} if layer.decoding else None


def _next_positions(x: jax.Array, positions: Any, state: Any) -> tuple[Any, Any]:
    """The position of each token, and the state after them."""
    if positions is not None:
        return positions, state
    positions = jnp.arange(x.shape[1], dtype=np.int32)
    if state is None:
        return positions, None
    return state["count"] + positions, {"count": state["count"] + x.shape[1]}
