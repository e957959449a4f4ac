"""Attention: queries, keys and values to each query's weighted mean of the values."""

from dataclasses import KW_ONLY
from typing import ClassVar

from jax.lax import PrecisionLike

from mlax._jax import named_key
from mlax.core import DType, Initializer, Layer, Zeros, frozen
from mlax.dtypes import cast
from mlax.ops import Kernel, attention

EXTRAS = ("segments", "source_segments", "lengths", "query_positions", "key_positions", "mask", "bias")


@frozen
class Attention(Layer):
    """Attend from queries to keys and values, as `ops.attention` does: the part of MultiHeadAttention that mixes time.

    A dict of query (b, t, h, k), key and value (b, s, g, k) to (b, t, h, k), in their dtype. It may also hold
    segments (b, t) and source_segments (b, s), lengths (b,), query_positions (t,) with key_positions (s,), mask and
    bias (b, h, t, s). Trainables: sinks (h,), if `sinks`. `dropout` sets weights to 0 while training.
    """

    takes_statistics: ClassVar[bool] = True

    _: KW_ONLY
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    scale: float | None = None  # None: 1 / sqrt(k)
    dropout: float = 0.0
    sinks_init: Initializer = Zeros()
    precision: PrecisionLike = None
    accum_dtype: DType = None  # None: the input's own; cuDNN needs float32
    param_dtype: DType = None  # None: the input's own
    implementation: Kernel | None = None  # None: the fastest that can; ops.attention_kernel names it

    def __post_init__(self):
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"Attention: dropout is {self.dropout}, but must be a probability below 1.")
        if self.window is not None and self.window < 1:
            raise ValueError(f"Attention: window is {self.window}, but must be at least 1, the query's own position.")
        if self.implementation not in (None, "cudnn", "xla", "chunked"):
            raise ValueError(
                f"Attention: implementation is {self.implementation!r}, but must be cudnn, xla, chunked or None."
            )
        if self.dropout and self.implementation in ("cudnn", "chunked"):
            raise ValueError(
                f"Attention: {self.implementation} drops no weights; use implementation='xla', or no dropout."
            )

    def init(self, rng, x):
        unknown = (
            ", ".join(sorted(x.keys() - {"query", "key", "value", *EXTRAS})) if isinstance(x, dict) else "no names"
        )
        if unknown or not {"query", "key", "value"} <= x.keys():
            raise ValueError(
                f"{self}: the input has {unknown or 'too little'}, but must be a dict of query, key and value, and may "
                f"also hold {', '.join(EXTRAS)}."
            )
        if not self.sinks:
            return None, None
        query = x["query"]
        return {
            "sinks": self.sinks_init(named_key(rng, "sinks"), query.shape[2:3], self.param_dtype or query.dtype)
        }, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        dropout = 0.0 if self.dropout == 0.0 or inference_mode else self.dropout
        if dropout and rng is None:
            raise ValueError(f"{self}: there is no key to drop by; pass rng=, or inference_mode=True.")
        ours, theirs = x.get("segments"), x.get("source_segments")
        y = attention(
            x["query"],
            x["key"],
            x["value"],
            causal=self.causal,
            window=self.window,
            segments=ours if theirs is None else (ours, theirs),
            lengths=x.get("lengths"),
            positions=(x["query_positions"], x["key_positions"]) if "key_positions" in x else None,
            mask=x.get("mask"),
            bias=x.get("bias"),
            alibi=self.alibi,
            softcap=self.softcap,
            sinks=cast(trainables["sinks"], x["query"].dtype) if self.sinks else None,
            scale=self.scale,
            dropout=dropout,
            rng=rng,
            precision=self.precision,
            accum_dtype=self.accum_dtype,
            implementation=self.implementation,
        )
        return y, non_trainables
