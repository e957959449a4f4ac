"""Attention and MultiHeadAttention."""

from dataclasses import KW_ONLY
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import PrecisionLike

from mlax._jax import named_key
from mlax.core import Composite, DType, Initializer, Layer, Sub, Wrapper, Zeros, frozen, lecun, with_fields
from mlax.dtypes import cast
from mlax.nn._kv_cache import KeyValueCache, Position
from mlax.nn._linear import Linear
from mlax.nn._positions import RelativeBias, Rotary
from mlax.ops import AttentionBackend, attention

OPTIONAL_INPUTS = ("segments", "source_segments", "lengths", "query_positions", "key_positions", "mask", "bias")


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
                f"Attention: {self.implementation} drops no weights; use implementation='xla', or no dropout."
            )

    def init(self, rng, x):
        unknown = (
            ", ".join(sorted(x.keys() - {"query", "key", "value", *OPTIONAL_INPUTS}))
            if isinstance(x, dict)
            else "no names"
        )
        if unknown or not {"query", "key", "value"} <= x.keys():
            raise ValueError(
                f"{self}: the input has {unknown or 'too little'}, but must be a dict of query, key and value, and may "
                f"also hold {', '.join(OPTIONAL_INPUTS)}."
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


INPUT_NAMES = ("x", "source", "segments", "source_segments", "lengths", "positions", "mask", "bias")


@frozen
class MultiHeadAttention(Composite):
    """Attend from each token to the others, or to those of a source, with several heads: (b, t, d) to (b, t, features).

    The input is x (b, t, d); or a pair (x, source) for cross attention, source (b, s, ...); or a dict with any of
    - x; source: these two;
    - segments (b, t), source_segments (b, s): ids of packed sequences, which do not see each other;
    - lengths (b,): how many tokens of each row of the source, or of x, are no padding;
    - positions (t,) or (b, t): what `rotary` turns by, from 0 on unless given; causal and window go by order;
    - mask, bias (b, h, t, s), each axis of that size or 1.

    Each of `heads` query heads is `head_width` wide, d / heads unless given; `kv_heads` of keys and values are shared
    by equally many of them. `qk_norm` is a layer for queries and keys, such as RMSNorm(). The output is `features`
    wide, d unless given. Dropout of weights while training needs a key.

    With `cache`, each call appends its tokens to up to `cache` tokens before and sees them all, or the last
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
    precision: lax.PrecisionLike = None
    accum_dtype: DType = None  # of the softmax; None: the input's own
    param_dtype: DType = None  # None: the input's own
    cache_dtype: DType = None  # None: the dtype that init sees
    implementation: AttentionBackend | None = None

    def __post_init__(self):
        for name in ("heads", "kv_heads", "head_width", "features", "cache"):
            value = getattr(self, name)
            if (value is not None or name == "heads") and (not isinstance(value, int) or value < 1):
                raise ValueError(f"MultiHeadAttention: {name} is {value!r}, but must be a whole number of at least 1.")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"MultiHeadAttention: {self.heads} heads are no multiple of {self.kv_heads} kv_heads.")
        if self.cache is not None and not self.causal:
            raise ValueError("MultiHeadAttention: a cache holds earlier tokens only; pass causal=True.")
        if self.relative is not None and self.relative.heads != self.heads:
            raise ValueError(f"MultiHeadAttention: {self.relative} does not have the {self.heads} heads of this layer.")
        _attention(self)

    def parts(self):
        width = self.head_width  # None: as wide as the input says, which `sized` fills in
        out_bias = self.bias if self.out_bias is None else self.out_bias
        parts: dict[str, Layer] = {
            "query": self._linear(width and self.heads * width, self.bias),
            "key": self._linear(width and (self.kv_heads or self.heads) * width, self.bias),
            "value": self._linear(width and (self.kv_heads or self.heads) * width, self.bias),
            "attend": _attention(self),
            "out": self._linear(self.features, out_bias),
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

    def splits(self, number):
        shared = (self.kv_heads or self.heads) % number == 0
        names = ("query", "key", "value") if shared else ("query",) if self.heads % number == 0 else ()
        axes = {f"{name}/{leaf}": -1 for name in names for leaf in ("kernel", "bias")}
        return {**axes, "out/kernel": -2} if axes else {}

    def sized(self, x: Any) -> Self:
        width = self._given(x)["x"].shape[-1]
        if self.head_width is None and width % self.heads:
            raise ValueError(
                f"{type(self).__name__}: an input of width {width} does not divide into {self.heads} heads; choose "
                "another number of heads, or say how wide they are with head_width=."
            )
        sized = with_fields(
            self, head_width=self.head_width or width // self.heads, features=self.features or width, edits=()
        )
        made = sized.parts()
        return with_fields(sized, edits=tuple((name, _with_features(part, made[name])) for name, part in self.edits))

    def wire(self, sub: Sub, x: Any) -> Any:
        given = self._given(x)
        x, source = given["x"], given.get("source", given["x"])
        q, k, v = self._heads(sub.query(x)), self._heads(sub.key(source)), self._heads(sub.value(source))
        if self.qk_norm is not None:
            q, k = sub.query_norm(q), sub.key_norm(k)
        ours = theirs = given.get("positions")
        if "source" in given:
            theirs = None
        if self.cache is not None:
            ours = theirs = sub.position(x)
        if self.rotary is not None:
            q = sub.rotary(q if ours is None else (q, ours))
            k = sub.rotary(k if theirs is None else (k, theirs))
        ordered = {}
        if self.cache is not None:
            held = sub.cache({"key": k, "value": v, "positions": theirs})
            k, v = held["key"], held["value"]
            ordered = {"query_positions": ours, "key_positions": held["positions"]}
        if self.relative is not None:
            queries = ordered.get("query_positions", jnp.arange(q.shape[1], dtype=np.int32))
            keys = ordered.get("key_positions", jnp.arange(k.shape[1], dtype=np.int32))
            relative = sub.relative((queries[None], keys[None]))
            given["bias"] = relative + given["bias"] if "bias" in given else relative
        passed = ("segments", "source_segments", "lengths", "mask", "bias")
        extras = {name: given[name] for name in passed if name in given}
        y = sub.attend({"query": q, "key": k, "value": v, **ordered, **extras})  # (b, t, h, k)
        return sub.out(lax.collapse(y, 2))

    def _linear(self, features: int | None, bias: bool) -> Linear:
        return Linear(
            features,  # pyright: ignore[reportArgumentType]
            bias=bias,
            kernel_init=self.kernel_init,
            precision=self.precision,
            param_dtype=self.param_dtype,
        )

    def _heads(self, x: Any) -> Any:
        """(b, t, h * k) as (b, t, h, k)."""
        return x.reshape(*x.shape[:2], x.shape[2] // self.head_width, self.head_width)

    def _given(self, x: Any) -> dict[str, Any]:
        """The input as a dict, whichever of its forms it has."""
        arrays = x if isinstance(x, tuple) else (x,)
        given: dict[str, Any] = dict(x) if isinstance(x, dict) else {**dict(zip(INPUT_NAMES, arrays, strict=False))}
        unknown = ", ".join(given.keys() - set(INPUT_NAMES))
        if unknown or "x" not in given or (isinstance(x, tuple) and len(x) != 2):
            raise ValueError(
                f"{type(self).__name__}: the input must be an array x, a pair (x, source), or a dict of x and any of "
                f"{', '.join(INPUT_NAMES[1:])}, but {f'has {unknown}' if unknown else 'is none of these'}."
            )
        for name in ("x", "source"):
            if name in given and given[name].ndim != 3:
                raise ValueError(
                    f"{type(self).__name__}: {name} is {given[name].shape}, but must be (batch, time, width)."
                )
        refused = ", ".join(given.keys() - {"x"}) if self.cache is not None else ""
        if refused:
            raise ValueError(
                f"{type(self).__name__}: with a cache the input is x alone; there is no place for {refused}."
            )
        return given


def _attention(self: MultiHeadAttention) -> Attention:
    return Attention(
        causal=self.causal,
        window=self.window,
        softcap=self.softcap,
        sinks=self.sinks,
        alibi=self.alibi,
        scale=self.scale,
        dropout=self.dropout,
        precision=self.precision,
        accum_dtype=self.accum_dtype,
        param_dtype=self.param_dtype,
        implementation=self.implementation,
    )


def _with_features(edited: Layer, made: Layer) -> Layer:
    """A part put in by surgery, with the width that it could not know."""
    if isinstance(edited, Wrapper):
        return with_fields(edited, layer=_with_features(edited.layer, made))
    if isinstance(edited, Linear) and isinstance(made, Linear) and edited.features is None:
        return with_fields(edited, features=made.features)
    return edited
