"""Position embeddings: learned, sinusoidal, rotary and relative."""

import abc
import math
from dataclasses import KW_ONLY
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mlax import ops
from mlax._jax import explicit_sharding, is_static, named_key
from mlax.core import Documented, DType, Initializer, Layer, Normal, Size, frozen
from mlax.dtypes import cast
from mlax.nn._kv_cache import Position


@frozen
class LearnedPositions(Layer):
    """Learned position embeddings, added to the input: (b, t, d) to (b, t, d), in the dtype of the input.

    Positions are 0, 1, 2, ...; the input may also be a pair of it and its positions, (t,) or (b, t). An input
    longer than `length`, or a position of `length` or more, is an error; a traced position, as inside `jit`, gives NaN.
    Trainables: table (length, d).

    With `decoding`, each row continues after its tokens in earlier calls, and the input may be a pair of it and lengths
    (b,): how many tokens of each row are not padding, and so counted. Non-trainables: count (b,), the tokens so far.
    A dict of x and lengths, which may be None, is accepted with and without `decoding`, which alone reads the lengths.

    >>> layer, x = nn.LearnedPositions(512), jnp.ones((8, 20, 64))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 20, 64)
    """

    length: Size  # the number of positions
    _: KW_ONLY
    decoding: bool = False  # whether to count the tokens of earlier calls
    table_init: Initializer = Normal(0.02)  # of the table
    param_dtype: DType = None  # None: the input's

    def init(self, rng, x):
        x, _ = _split_pair(self, x)
        self._check_time(x)
        table = self.table_init(named_key(rng, "table"), (self.length, x.shape[-1]), self.param_dtype or x.dtype)
        return {"table": table}, _init_count(self, x)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        given = _split_pair(self, x)[1]
        x, positions, non_trainables = _next_positions(self, x, non_trainables)
        self._check_time(x)
        table = cast(trainables["table"], x.dtype)
        if given is None and not self.decoding and is_static(x.shape[1]) and explicit_sharding(x) is None:
            return x + table[None, : x.shape[1]], non_trainables  # a slice, whose gradient needs no sum by index
        ops.check_positions(str(self), positions, self.length, x.shape[:2])
        return x + ops.embedding(jnp.atleast_2d(positions), table), non_trainables

    def _check_time(self, x: Any) -> None:
        if is_static(x.shape[1]) and x.shape[1] > self.length:
            raise ValueError(f"{self}: the input {x.shape} is {x.shape[1]} long; pass a length of at least that.")


@frozen
class SinusoidalPositions(Layer):
    """Sinusoidal position embeddings, added to the input: (b, t, d) to (b, t, d), in the dtype of the input.

    Positions are 0, 1, 2, ...; the input may also be a pair of it and its positions, (t,) or (b, t).
    Positions are at most 2^20 - 1, as in `ops.rotary`. `decoding` is as in LearnedPositions.
    https://arxiv.org/abs/1706.03762, section 3.5.

    >>> nn.SinusoidalPositions().fwd(jnp.ones((8, 20, 64)), None)[0].shape
    (8, 20, 64)
    """

    needs_floating_input: ClassVar[bool] = True

    _: KW_ONLY
    base: float = 10_000.0  # of the wavelengths, the longest of which is about 2 pi base
    decoding: bool = False  # whether to count the tokens of earlier calls
    accum_dtype: DType = "float32"  # of the sines from position 1,024 on; None: the input's

    def init(self, rng, x):
        x, _ = _split_pair(self, x)
        if x.shape[-1] % 2:
            raise ValueError(f"{self}: the input {x.shape} is {x.shape[-1]} wide, but the width must be even.")
        return None, _init_count(self, x)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        x, positions, non_trainables = _next_positions(self, x, non_trainables)
        ops.check_positions(str(self), positions, 2**20, x.shape[:2])
        positions = positions[None] if positions.ndim == 1 else positions
        waves = ops.sinusoids(positions, x.shape[-1], x.dtype, base=self.base, accum_dtype=self.accum_dtype)
        return x + waves, non_trainables


@frozen
class RotaryScaling(metaclass=Documented):
    """How rotary frequencies change for contexts longer than those in training."""

    @abc.abstractmethod
    def frequencies(self, width: int, base: float, time: int | None = None) -> tuple[float, ...]:
        """The frequencies of `width` features in a sequence of `time` tokens; None: unknown while tracing."""

    def magnitude(self) -> float:
        """What the rotated queries and keys are multiplied by."""
        return 1.0


@frozen
class LinearScaling(RotaryScaling):
    """Linear scaling of rotary frequencies, all divided by `factor`. https://arxiv.org/abs/2306.15595, equation 4.

    >>> nn.Rotary(scaling=nn.LinearScaling(4.0)).fwd(jnp.ones((8, 20, 4, 16)), None)[0].shape
    (8, 20, 4, 16)
    """

    factor: float  # how much longer the sequences are

    def frequencies(self, width, base, time=None):
        return ops.linear_frequencies(ops.rotary_frequencies(width, base), self.factor)


@frozen
class NTKScaling(RotaryScaling):
    """NTK-aware scaling of rotary frequencies by a larger base: the highest stays, the lowest is divided by `factor`.

    https://arxiv.org/abs/2309.00071.

    >>> nn.Rotary(scaling=nn.NTKScaling(4.0)).fwd(jnp.ones((8, 20, 4, 16)), None)[0].shape
    (8, 20, 4, 16)
    """

    factor: float  # how much longer the sequences are

    def frequencies(self, width, base, time=None):
        return ops.ntk_frequencies(width, base, self.factor)


@frozen
class DynamicNTKScaling(RotaryScaling):
    """NTK-aware scaling by a factor that grows with the sequence: `factor * t / length - (factor - 1)` beyond `length`.

    `length` is that of the pretraining, and t that of the input, or `time` if given. A decoder needs `time`, the
    longest sequence that it will see, since cached keys are not rotated again. https://arxiv.org/abs/2309.00071

    >>> nn.Rotary(scaling=nn.DynamicNTKScaling(4.0, length=2048)).fwd(jnp.ones((8, 20, 4, 16)), None)[0].shape
    (8, 20, 4, 16)
    """

    factor: float  # how fast it grows beyond `length`
    _: KW_ONLY
    length: int  # of the sequences in training
    time: int | None = None  # None: that of the input

    def frequencies(self, width, base, time=None):
        time = time if self.time is None else self.time
        if time is None:
            raise ValueError(f"{self}: the length of the sequence is not known where positions are given; pass time=.")
        return ops.dynamic_ntk_frequencies(width, base, self.factor, self.length, time)


@frozen
class YaRNScaling(RotaryScaling):
    """YaRN's scaling of rotary frequencies: low ones are divided by `factor`, high ones stay, and scores are sharper.

    A frequency is high with more than `fast` periods in the pretraining's `length` positions, and low with fewer than
    `slow`. Queries and keys are multiplied by `attention_factor`, 0.1 ln(factor) + 1 unless given.
    https://arxiv.org/abs/2309.00071

    >>> nn.Rotary(scaling=nn.YaRNScaling(4.0, length=2048)).fwd(jnp.ones((8, 20, 4, 16)), None)[0].shape
    (8, 20, 4, 16)
    """

    factor: float  # how much longer the sequences are
    _: KW_ONLY
    length: int  # of the sequences in training
    fast: float = 32.0  # periods in `length` above which a frequency stays
    slow: float = 1.0  # periods in `length` below which it is divided
    attention_factor: float | None = None  # of queries and keys; None: 0.1 ln(factor) + 1

    def frequencies(self, width, base, time=None):
        return ops.yarn_frequencies(width, base, self.factor, self.length, self.fast, self.slow)

    def magnitude(self):
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0


@frozen
class Llama3Scaling(RotaryScaling):
    """Llama 3.1's scaling of rotary frequencies: low ones are divided by `factor`, high ones stay.

    A frequency is low with fewer than `low` periods in `length` positions, and high with more than `high`.
    https://arxiv.org/abs/2407.21783

    >>> nn.Rotary(base=500_000.0, scaling=nn.Llama3Scaling()).fwd(jnp.ones((8, 20, 4, 16)), None)[0].shape
    (8, 20, 4, 16)
    """

    _: KW_ONLY
    factor: float = 8.0  # how much longer the sequences are
    low: float = 1.0  # periods in `length` below which a frequency is divided
    high: float = 4.0  # periods in `length` above which it stays
    length: int = 8192  # of the sequences in training

    def frequencies(self, width, base, time=None):
        frequencies = ops.rotary_frequencies(width, base)
        return ops.llama3_frequencies(frequencies, self.factor, self.low, self.high, self.length)


@frozen
class Rotary(Layer):
    """Rotary position embeddings (RoPE): rotate pairs of features by angles proportional to the position.

    (b, t, h, k) to the same, in the dtype of the input. Positions are 0, 1, 2, ...; the input may also be a pair of it
    and its positions, (t,) or (b, t), from 0 to 2^20 - 1: another one is an error, or NaN if it is traced. The first
    `width` features, all unless given, are rotated. `interleaved` pairs neighbors, as GPT-J does, and otherwise halves,
    as Llama and GPT-NeoX do. `scaling` is LinearScaling, NTKScaling, DynamicNTKScaling, YaRNScaling or Llama3Scaling.
    https://arxiv.org/abs/2104.09864, equation 34.

    >>> nn.Rotary(base=500_000.0).fwd(jnp.ones((8, 20, 4, 16)), None)[0].shape
    (8, 20, 4, 16)
    """

    needs_floating_input: ClassVar[bool] = True

    _: KW_ONLY
    base: float = 10_000.0  # of the wavelengths, the longest of which is about 2 pi base
    width: int | None = None  # of the part of a head that is rotated; None: all
    scaling: RotaryScaling | None = None  # for longer sequences than in training
    interleaved: bool = False  # whether neighbors are pairs, not halves
    accum_dtype: DType = "float32"  # of cosines and sines from position 1,024 on, or given ones; None: the input's

    def __post_init__(self):
        if self.width is not None and (not isinstance(self.width, int) or self.width < 2 or self.width % 2):
            raise ValueError(
                f"Rotary: width is {self.width!r}, but must be an even integer, since features are rotated in pairs."
            )

    def init(self, rng, x):
        x, positions = x if isinstance(x, tuple) else (x, None)
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
        if positions is not None:
            ops.check_positions(str(self), positions, 2**20, x.shape[:2])
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        x, positions = x if isinstance(x, tuple) else (x, None)
        width = x.shape[-1] if self.width is None else self.width
        if positions is not None:
            ops.check_positions(str(self), positions, 2**20, x.shape[:2])
        frequencies, magnitude = ops.rotary_frequencies(width, self.base), 1.0
        if self.scaling is not None:
            time = x.shape[1] if positions is None else None
            frequencies, magnitude = self.scaling.frequencies(width, self.base, time), self.scaling.magnitude()
        y = ops.rotary(
            x,
            positions,
            frequencies=frequencies,
            interleaved=self.interleaved,
            magnitude=magnitude,
            accum_dtype=self.accum_dtype,
        )
        return y, non_trainables


@frozen
class RelativeBias(Layer):
    """Relative position bias, as in T5: a learned bias for the distance between each query and key.

    A pair of positions, integers (b, t) and (b, s), to a bias (b, heads, t, s), in the table's dtype.
    Trainables: table (buckets, heads). https://arxiv.org/abs/1910.10683, section 2.1.

    A dict of x (b, t, d) and lengths (b,), which may be None, gives the bias for self-attention of x, (1, heads, t, t),
    in the dtype of x, to be computed once for several layers. With `cache`, as many slots as theirs have, it is
    (b, heads, t, cache), and each row continues after its tokens in earlier calls. Non-trainables then: count (b,), the
    tokens so far.

    >>> layer, positions = nn.RelativeBias(heads=4), jnp.arange(20)[None]
    >>> trainables, _ = layer.init(jax.random.key(0), (positions, positions))
    >>> layer.fwd((positions, positions), trainables)[0].shape
    (1, 4, 20, 20)
    """

    heads: Size  # how many
    _: KW_ONLY
    buckets: Size = 32  # of distances
    farthest: int = 128  # distance from which all share the last bucket
    bidirectional: bool = True  # False for decoders: keys ahead count as distance 0
    cache: int | None = None  # the slots of the layers' KV caches
    table_init: Initializer = Normal(0.02)  # of the table
    param_dtype: DType = "float32"  # the input has no floating dtype to follow

    def init(self, rng, x):
        table = {"table": self.table_init(named_key(rng, "table"), (self.buckets, self.heads), self.param_dtype)}
        if isinstance(x, dict):
            x, _ = self._split_dict(x)
            return table, None if self.cache is None else {"count": jnp.zeros(x.shape[0], np.int32)}
        if not isinstance(x, tuple) or len(x) != 2 or any(each.ndim != 2 or each.dtype.kind not in "iu" for each in x):
            raise TypeError(f"{self}: the input is {x}, but must be a pair of integers, (batch, t) and (batch, s).")
        return table, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        (queries, keys), non_trainables = self._positions(x, non_trainables)
        table = cast(trainables["table"], x["x"].dtype) if isinstance(x, dict) else trainables["table"]
        y = ops.relative_bias(queries, keys, table, bidirectional=self.bidirectional, farthest=self.farthest)
        return y, non_trainables

    def _positions(self, x: Any, state: Any) -> tuple[tuple[Any, Any], Any]:
        """The positions of queries and keys, and the state after them."""
        if not isinstance(x, dict):
            return x, state
        x, lengths = self._split_dict(x)
        if self.cache is None:
            order = jnp.asarray(ops.default_positions(x.shape[1]))[None]
            return (order, order), state
        queries, state = Position().fwd((x, lengths), None, state)
        slots = jnp.broadcast_to(ops.default_positions(self.cache), (x.shape[0], self.cache))
        return (queries, slots), state

    def _split_dict(self, x: dict[str, Any]) -> tuple[Any, Any]:
        if not {"x"} <= x.keys() <= {"x", "lengths"} or x["x"].ndim != 3:
            raise ValueError(f"{self}: the input has {', '.join(x)}, but must be a dict of x (b, t, d) and lengths.")
        return x["x"], x.get("lengths")


def _split_pair(layer: Any, x: Any) -> tuple[Any, Any]:
    """The input, and None or what came with it: its positions, or its lengths when decoding."""
    if isinstance(x, dict):
        if not {"x"} <= x.keys() <= {"x", "lengths"}:
            raise ValueError(f"{layer}: the input has {', '.join(x)}, but must be a dict of x and lengths.")
        x = (x["x"], x.get("lengths")) if layer.decoding else x["x"]
    x, other = x if isinstance(x, tuple) else (x, None)
    if x.ndim != 3:
        raise ValueError(f"{layer}: the input has the shape {x.shape}, but must be (batch, time, width).")
    if other is not None and layer.decoding:
        if other.ndim != 1:
            raise ValueError(
                f"{layer}: it counts positions itself when decoding, but the input is a pair with {other.shape}; pass "
                "lengths (batch,), or positions of each row and decoding=False."
            )
        ops.check_lengths(str(layer), other, x.shape[0], x.shape[1], "tokens")
    return x, other


def _init_count(layer: Any, x: Any) -> dict[str, jax.Array] | None:
    return {"count": jnp.zeros(x.shape[0], np.int32)} if layer.decoding else None


def _next_positions(layer: Any, x: Any, state: Any) -> tuple[Any, Any, Any]:
    """The input, the position of each token, and the state after them."""
    x, other = _split_pair(layer, x)
    time = ops.default_positions(x.shape[1])
    if not layer.decoding:
        return x, time if other is None else other, state
    positions, state = Position().fwd((x, other), None, state)
    if other is not None:  # padding has no position, and may be past the last one
        positions = jnp.where(time < other[:, None], positions, np.zeros((), np.int32))
    return x, positions, state
