"""Attention: scaled dot-product attention of queries, keys and values, without projections."""

from dataclasses import KW_ONLY
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike

from mlax import ops
from mlax._jax import named_key
from mlax.core import DType, Initializer, Layer, Zeros, frozen
from mlax.dtypes import cast
from mlax.ops import AttentionBackend

REQUIRED_INPUTS = ("query", "key", "value")
OPTIONAL_INPUTS = ("segments", "source_segments", "lengths", "query_positions", "key_positions", "mask", "bias")


@frozen
class Attention(Layer):
    """Scaled dot-product attention, as `ops.attention`: MultiHeadAttention without its projections.

    A dict of query (b, t, h, k), key (b, s, g, k) and value (b, s, g, w) to (b, t, h, w), in their dtype. It may also
    hold segments (b, t) and source_segments (b, s), lengths (b,) or (), query_positions (t,) or (b, t) with
    key_positions (s,) or (b, s), a boolean mask and a bias (b, h, t, s). Trainables: sinks (h,), if `sinks`. `dropout`
    sets weights to 0 while training. With `return_weights`, it returns a dict of that as y and of weights (b, h, t, s),
    those before dropout, all of which are then in memory.

    >>> q, k = jnp.ones((8, 20, 4, 16)), jnp.ones((8, 30, 4, 16))
    >>> nn.Attention().fwd({"query": q, "key": k, "value": k}, None)[0].shape
    (8, 20, 4, 16)
    """

    has_statistics: ClassVar[bool] = True

    _: KW_ONLY
    causal: bool = False  # no token attends to later ones
    window: int | None = None  # a token attends to so many, itself included
    softcap: float | None = None  # c maps a score x to c * tanh(x / c)
    sinks: bool = False  # a learned score for each head in its softmax
    alibi: bool = False  # a bias by distance: ALiBi
    scale: float | None = None  # None: 1 / sqrt(k)
    dropout: float = 0.0  # of the weights, in training; needs a key
    return_weights: bool = False  # a dict of y and of weights (b, h, t, s)
    sinks_init: Initializer = Zeros()  # of the sinks
    precision: PrecisionLike = None  # of the products, as in jax.lax
    accum_dtype: DType = None  # None: the input's; cuDNN needs float32
    param_dtype: DType = None  # None: the input's
    implementation: AttentionBackend | None = None  # None: the fastest that can; ops.attention_backend names it

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
                f"Attention: {self.implementation} does not support dropout; use implementation='xla', or no dropout."
            )

    def init(self, rng, x):
        names = {*REQUIRED_INPUTS, *OPTIONAL_INPUTS}
        unknown = ", ".join(sorted(x.keys() - names)) if isinstance(x, dict) else "no names"
        missing = "" if unknown else ", ".join(name for name in REQUIRED_INPUTS if name not in x)
        if unknown or missing:
            raise ValueError(
                f"{self}: the input {f'has {unknown}' if unknown else f'lacks {missing}'}, but must be a dict of "
                f"query, key and value, and may also hold {', '.join(OPTIONAL_INPUTS)}."
            )
        if not self.sinks:
            return None, None
        query = x["query"]
        sinks = self.sinks_init(named_key(rng, "sinks"), query.shape[2:3], self.param_dtype or query.dtype)
        return {"sinks": sinks}, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        dropout = 0.0 if self.dropout == 0.0 or inference_mode else self.dropout
        if dropout and rng is None:
            raise ValueError(f"{self}: dropout needs a key; pass rng=, or inference_mode=True.")
        lengths = x.get("lengths")
        if lengths is not None and jnp.ndim(lengths) == 0:
            lengths = repeat_length(lengths, x["query"].shape[0])
        options = {
            "causal": self.causal,
            "window": self.window,
            "segments": self._pair(x, "segments", "source_segments"),
            "lengths": lengths,
            "positions": self._pair(x, "query_positions", "key_positions"),
            "mask": x.get("mask"),
            "bias": x.get("bias"),
            "alibi": self.alibi,
            "softcap": self.softcap,
            "sinks": cast(trainables["sinks"], x["query"].dtype) if self.sinks else None,
            "scale": self.scale,
            "precision": self.precision,
            "accum_dtype": self.accum_dtype,
        }
        y = ops.attention(
            x["query"],
            x["key"],
            x["value"],
            **options,
            dropout=dropout,
            rng=rng,
            implementation=self.implementation,
        )
        if not self.return_weights:
            return y, non_trainables
        return {"y": y, "weights": ops.attention_weights(x["query"], x["key"], **options)}, non_trainables

    def _pair(self, x: Any, query_name: str, key_name: str) -> Any:
        """What the input holds for queries and keys: a pair, None, or one array of segments for both."""
        if key_name in x and query_name not in x:
            raise ValueError(f"{self}: the input has {key_name} but not {query_name}; pass both.")
        if query_name in x and key_name not in x:
            if query_name == "segments":
                return x["segments"]
            raise ValueError(f"{self}: the input has {query_name} but not {key_name}; pass both.")
        return (x[query_name], x[key_name]) if key_name in x else None


def repeat_length(length: Any, b: Any) -> Any:
    """One length, or its shape, for each of b rows."""
    if isinstance(length, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((b,), length.dtype)
    if isinstance(length, int | np.integer) and not isinstance(length, bool) and isinstance(b, int):
        dtype = np.int32 if abs(int(length)) < 1 << 31 else np.int64  # as it is refused later, and does not wrap
        return np.full(b, length, dtype)  # its value is known while tracing
    return jnp.broadcast_to(jnp.asarray(length), (b,))  # in its dtype, so that a float is refused
