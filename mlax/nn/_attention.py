"""Attention, and MultiHeadAttention with learned projections, for training and for decoding."""

from dataclasses import KW_ONLY
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import PrecisionLike

from mlax import ops
from mlax._jax import named_key
from mlax.core import Composite, DType, Initializer, Layer, Sub, Wrapper, Zeros, frozen, lecun, with_fields
from mlax.dtypes import cast
from mlax.nn._kv_cache import KeyValueCache, Position
from mlax.nn._linear import Linear
from mlax.nn._positions import RelativeBias, Rotary
from mlax.ops import AttentionBackend

REQUIRED_INPUTS = ("query", "key", "value")
OPTIONAL_INPUTS = ("segments", "source_segments", "lengths", "query_positions", "key_positions", "mask", "bias")
MULTI_HEAD_INPUTS = ("x", "source", "segments", "source_segments", "lengths", "positions", "mask", "bias")


@frozen
class Attention(Layer):
    """Scaled dot-product attention, as `ops.attention`: MultiHeadAttention without its projections.

    A dict of query (b, t, h, k), key and value (b, s, g, k) to (b, t, h, k), in their dtype. It may also hold
    segments (b, t) and source_segments (b, s), lengths (b,), query_positions (t,) with key_positions (s,), mask and
    bias (b, h, t, s). Trainables: sinks (h,), if `sinks`. `dropout` sets weights to 0 while training.
    """

    has_statistics: ClassVar[bool] = True

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
        segments, source_segments = x.get("segments"), x.get("source_segments")
        y = ops.attention(
            x["query"],
            x["key"],
            x["value"],
            causal=self.causal,
            window=self.window,
            segments=segments if source_segments is None else (segments, source_segments),
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


@frozen
class MultiHeadAttention(Composite):
    """Multi-head attention, to the input itself or to a source: (b, t, d) to (b, t, features).

    The input is x (b, t, d); or a pair (x, source) for cross-attention, source (b, s, ...); or a dict with any of
    - x; source: as above;
    - segments (b, t), source_segments (b, s): ids of packed sequences, which do not attend to each other;
    - lengths (b,): how many tokens of each row of the source, or of x, are not padding;
    - positions (t,) or (b, t): for rotary embeddings, 0, 1, 2, ... unless given; causal and window go by order;
    - mask, bias (b, h, t, s), each axis of that size or 1.

    Each of `heads` query heads is `head_width` wide, d / heads unless given; each of `kv_heads` keys and values is
    shared by an equal number of them. `qk_norm` is a layer for queries and keys, such as RMSNorm(). The output is
    `features` wide, d unless given. Dropout of weights while training needs a key.

    With `cache`, each call appends its tokens to a cache of `cache` tokens and attends to all of them, or to the last
    `window` of them if that is fewer; see KeyValueCache for what happens when it is full.

    Variables: those of the parts query, key, value and out, each a Linear, attend (`sinks`), query_norm, key_norm and
    relative; in non_trainables position and cache. https://arxiv.org/abs/1706.03762, section 3.2.2.
    """

    heads: int
    _: KW_ONLY
    kv_heads: int | None = None
    head_width: int | None = None
    features: int | None = None
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    rotary: Rotary | None = None
    relative: RelativeBias | None = None
    qk_norm: Layer | None = None
    scale: float | None = None
    dropout: float = 0.0
    bias: bool = True
    out_bias: bool | None = None  # None: like `bias`
    cache: int | None = None
    kernel_init: Initializer = lecun()
    precision: PrecisionLike = None
    accum_dtype: DType = None  # of the softmax; None: the input's
    param_dtype: DType = None  # None: the input's
    cache_dtype: DType = None  # None: the dtype that init sees
    implementation: AttentionBackend | None = None

    def __post_init__(self):
        for name in ("heads", "kv_heads", "head_width", "features", "cache"):
            value = getattr(self, name)
            if (value is not None or name == "heads") and (not isinstance(value, int) or value < 1):
                raise ValueError(f"MultiHeadAttention: {name} is {value!r}, but must be an integer of at least 1.")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"MultiHeadAttention: {self.heads} heads are not a multiple of {self.kv_heads} kv_heads.")
        if self.cache is not None and not self.causal:
            raise ValueError("MultiHeadAttention: a cache holds earlier tokens only; pass causal=True.")
        if self.relative is not None and self.relative.heads != self.heads:
            raise ValueError(f"MultiHeadAttention: {self.relative} does not have the {self.heads} heads of this layer.")
        _attention_of(self)

    def parts(self):
        width = self.head_width  # None: `infer_sizes` reads it from the input
        kv_features = width and (self.kv_heads or self.heads) * width
        parts: dict[str, Layer] = {
            "query": self._linear(width and self.heads * width, self.bias),
            "key": self._linear(kv_features, self.bias),
            "value": self._linear(kv_features, self.bias),
            "attend": _attention_of(self),
            "out": self._linear(self.features, self.bias if self.out_bias is None else self.out_bias),
        }
        if self.qk_norm is not None:
            parts |= {"query_norm": self.qk_norm, "key_norm": self.qk_norm}
        if self.rotary is not None:
            parts |= {"rotary": self.rotary}
        if self.relative is not None:
            parts |= {"relative": self.relative}
        if self.cache is not None:
            ring = self.window is not None and self.window <= self.cache
            slots = self.window if ring and self.window else self.cache
            parts |= {"position": Position(), "cache": KeyValueCache(slots, ring=ring, param_dtype=self.cache_dtype)}
        return parts

    def tensor_parallel_axes(self, number):
        shared = (self.kv_heads or self.heads) % number == 0
        names = ("query", "key", "value") if shared else ("query",) if self.heads % number == 0 else ()
        axes = {f"{name}/{leaf}": -1 for name in names for leaf in ("kernel", "bias")}
        return {**axes, "out/kernel": -2} if axes else {}

    def infer_sizes(self, x: Any) -> Self:
        width = self._named_inputs(x)["x"].shape[-1]
        if self.head_width is None and width % self.heads:
            raise ValueError(
                f"{type(self).__name__}: an input of width {width} does not divide into {self.heads} heads; choose "
                "another number of heads, or pass head_width=."
            )
        sized = with_fields(
            self, head_width=self.head_width or width // self.heads, features=self.features or width, edits=()
        )
        parts = sized.parts()
        return with_fields(sized, edits=tuple((name, _with_features(part, parts[name])) for name, part in self.edits))

    def wire(self, sub: Sub, x: Any) -> Any:
        inputs = self._named_inputs(x)
        x, source = inputs["x"], inputs.get("source", inputs["x"])
        q, k, v = (self._split_heads(y) for y in (sub.query(x), sub.key(source), sub.value(source)))
        if self.qk_norm is not None:
            q, k = sub.query_norm(q), sub.key_norm(k)
        query_positions = key_positions = inputs.get("positions")
        if "source" in inputs:
            key_positions = None
        if self.cache is not None:
            query_positions = key_positions = sub.position(x)
        if self.rotary is not None:
            q = sub.rotary(q if query_positions is None else (q, query_positions))
            k = sub.rotary(k if key_positions is None else (k, key_positions))
        positions = {}
        if self.cache is not None:
            cached = sub.cache({"key": k, "value": v, "positions": key_positions})
            k, v = cached["key"], cached["value"]
            positions = {"query_positions": query_positions, "key_positions": cached["positions"]}
        if self.relative is not None:
            queries = positions.get("query_positions", jnp.arange(q.shape[1], dtype=np.int32))
            keys = positions.get("key_positions", jnp.arange(k.shape[1], dtype=np.int32))
            relative = sub.relative((queries[None], keys[None]))
            inputs["bias"] = relative + inputs["bias"] if "bias" in inputs else relative
        passed_on = ("segments", "source_segments", "lengths", "mask", "bias")
        optional = {name: inputs[name] for name in passed_on if name in inputs}
        y = sub.attend({"query": q, "key": k, "value": v, **positions, **optional})  # (b, t, h, k)
        return sub.out(lax.collapse(y, 2))

    def _linear(self, features: int | None, bias: bool) -> Linear:
        return Linear(
            features,  # pyright: ignore[reportArgumentType]
            bias=bias,
            kernel_init=self.kernel_init,
            precision=self.precision,
            param_dtype=self.param_dtype,
        )

    def _split_heads(self, x: Any) -> Any:
        """(b, t, h * k) as (b, t, h, k)."""
        return x.reshape(*x.shape[:2], x.shape[2] // self.head_width, self.head_width)

    def _named_inputs(self, x: Any) -> dict[str, Any]:
        """The input as a dict: from an array, a pair or a dict."""
        name, arrays = type(self).__name__, x if isinstance(x, tuple) else (x,)
        inputs: dict[str, Any] = dict(x) if isinstance(x, dict) else dict(zip(MULTI_HEAD_INPUTS, arrays, strict=False))
        unknown = ", ".join(inputs.keys() - set(MULTI_HEAD_INPUTS))
        if unknown or "x" not in inputs or (isinstance(x, tuple) and len(x) != 2):
            raise ValueError(
                f"{name}: the input must be an array x, a pair (x, source), or a dict of x and any of "
                f"{', '.join(MULTI_HEAD_INPUTS[1:])}, but {f'has {unknown}' if unknown else 'is none of these'}."
            )
        for each in ("x", "source"):
            if each in inputs and inputs[each].ndim != 3:
                raise ValueError(f"{name}: {each} is {inputs[each].shape}, but must be (batch, time, width).")
        if self.cache is not None and inputs.keys() != {"x"}:
            others = ", ".join(inputs.keys() - {"x"})
            raise ValueError(f"{name}: with a cache the input must be x alone, without {others}.")
        return inputs


def _attention_of(layer: MultiHeadAttention) -> Attention:
    """The part that attends; a function, since methods need a finished description and `__post_init__` calls it."""
    return Attention(
        causal=layer.causal,
        window=layer.window,
        softcap=layer.softcap,
        sinks=layer.sinks,
        alibi=layer.alibi,
        scale=layer.scale,
        dropout=layer.dropout,
        precision=layer.precision,
        accum_dtype=layer.accum_dtype,
        param_dtype=layer.param_dtype,
        implementation=layer.implementation,
    )


def _with_features(edited: Layer, part: Layer) -> Layer:
    """A part put in by surgery, with the features that are inferred from the input."""
    if isinstance(edited, Wrapper):
        return with_fields(edited, layer=_with_features(edited.layer, part))
    if isinstance(edited, Linear) and isinstance(part, Linear) and edited.features is None:
        return with_fields(edited, features=part.features)
    return edited
