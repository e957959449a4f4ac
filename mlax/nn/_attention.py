"""MultiHeadAttention: attention with learned projections, for training and for decoding."""

from dataclasses import KW_ONLY
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import PrecisionLike

from mlax import _gpu, ops
from mlax.core import Composite, DType, Initializer, Layer, Sub, Wrapper, frozen, lecun, parts_of, with_fields
from mlax.dtypes import cast
from mlax.nn._dot_product_attention import OPTIONAL_INPUTS, Attention, repeat_length
from mlax.nn._kv_cache import KeyValueCache, Position, SourceCache
from mlax.nn._linear import Linear
from mlax.nn._positions import RelativeBias, Rotary
from mlax.ops import AttentionBackend

SOURCES = ("source", "value_source", "source_segments")
MULTI_HEAD_INPUTS = ("x", *SOURCES, "segments", "lengths", "positions", "mask", "bias")
ATTENTION_FIELDS = (  # of MultiHeadAttention, for its part attend alone
    *("causal", "window", "softcap", "sinks", "alibi", "scale", "dropout", "return_weights"),
    *("accum_dtype", "implementation"),
)


@frozen
class MultiHeadAttention(Composite):
    """Multi-head attention, to the input itself or to a source: (b, t, d) to (b, t, features).

    The input is x (b, t, d); a pair (x, source) for cross-attention, source (b, s, ...); or a dict with any of x,
    source, value_source (b, s, ...), for the values; segments (b, t), source_segments (b, s), ids of packed sequences;
    lengths (b,) or (), the tokens of a row of the source, or of x, that are not padding; positions (t,) or (b, t), of
    `rotary`; mask, boolean, and bias (b, h, t, s), each axis of that size or 1. None counts as absent. With `cache`, a
    call appends its tokens to a KV cache (KeyValueCache); with `cross`, it stores a source, for later calls without
    one. Variables: query, key, value, out, attend and others. https://arxiv.org/abs/1706.03762, section 3.2.2.

    >>> layer, x = nn.MultiHeadAttention(heads=4, causal=True), jnp.ones((8, 20, 64))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd({"x": x, "lengths": jnp.full(8, 15)}, trainables, non_trainables)[0].shape
    (8, 20, 64)
    """

    heads: int  # of the queries
    _: KW_ONLY
    kv_heads: int | None = None  # of keys and values, each shared by several queries; None: heads
    head_width: int | None = None  # of a query and a key; None: d / heads
    value_width: int | None = None  # of a value; None: head_width
    features: int | None = None  # of the output; None: d
    causal: bool = False  # no token attends to later ones
    cross: bool = False  # x attends to a source alone, never to itself
    window: int | None = None  # a token attends to so many, itself included
    softcap: float | None = None  # c maps a score x to c * tanh(x / c)
    sinks: bool = False  # a learned score for each head that takes part in its softmax
    alibi: bool = False  # a bias by distance: ALiBi
    rotary: Rotary | None = None  # of queries and keys
    relative: RelativeBias | None = None  # a learned bias by distance
    qk_norm: Layer | None = None  # for queries and keys, RMSNorm() say
    scale: float | None = None  # of the scores; None: 1 / sqrt(head_width)
    dropout: float = 0.0  # of the weights, in training; needs a key
    return_weights: bool = False  # a dict of y and of weights (b, h, t, s), before dropout
    bias: bool = True  # of query, key and value
    fused: bool = False  # one product, the part qkv, in place of query, key and value
    out_bias: bool | None = None  # None: like `bias`
    cache: int | None = None  # the tokens of a KV cache; any number with `cross`
    kernel_init: Initializer = lecun()  # of all four kernels
    precision: PrecisionLike = None  # of all products
    accum_dtype: DType = None  # of the softmax; None: the input's
    param_dtype: DType = None  # None: the input's
    cache_dtype: DType = None  # None: as init sees; int8 and float8_e4m3fn have scales
    implementation: AttentionBackend | None = None  # None: the fastest that supports these options

    def __post_init__(self):
        for name in ("heads", "kv_heads", "head_width", "value_width", "features", "cache"):
            value = getattr(self, name)
            if (value is not None or name == "heads") and (not isinstance(value, int) or value < 1):
                raise ValueError(f"MultiHeadAttention: {name} is {value!r}, but must be an integer of at least 1.")
        if self.heads % (self.kv_heads or self.heads):
            divisors = [number for number in range(1, self.heads + 1) if self.heads % number == 0]
            raise ValueError(
                f"MultiHeadAttention: {self.heads} heads are not a multiple of {self.kv_heads} kv_heads; pass one of "
                f"kv_heads={', '.join(map(str, divisors))}."
            )
        if self.cache is not None and not self.causal and not self.cross:
            raise ValueError("MultiHeadAttention: a cache holds earlier tokens only; pass causal=True.")
        if self.cross and (self.causal or self.window is not None or self.rotary is not None or self.relative):
            raise ValueError(
                "MultiHeadAttention: with cross=True there is no order between queries and keys, so causal, window, "
                "rotary and relative cannot be set."
            )
        if self.fused and self.cross:
            raise ValueError(
                "MultiHeadAttention: with cross=True keys and values are of another input; leave out fused."
            )
        if self.relative is not None and self.relative.heads != self.heads:
            raise ValueError(f"MultiHeadAttention: {self.relative} does not have the {self.heads} heads of this layer.")
        _attention_of(self)

    def parts(self):
        width = self.head_width  # None: `infer_sizes` reads it from the input
        value_width, kv_heads = self.value_width or width, self.kv_heads or self.heads
        sizes = {"query": width and self.heads * width, "key": width and kv_heads * width}
        sizes["value"] = value_width and kv_heads * value_width
        if self.fused:
            sizes = {"qkv": width and sum(size or 0 for size in sizes.values())}
        parts: dict[str, Layer] = {
            **{name: self._linear(size, self.bias) for name, size in sizes.items()},
            "attend": _attention_of(self),
            "out": self._linear(self.features, self.bias if self.out_bias is None else self.out_bias),
        }
        if self.qk_norm is not None:
            parts |= {"query_norm": self.qk_norm, "key_norm": self.qk_norm}
        if self.rotary is not None:
            parts |= {"rotary": self.rotary}
        if self.relative is not None:
            parts |= {"relative": self.relative}
        if self.cache is not None and self.cross:
            parts |= {"cache": SourceCache(param_dtype=self.cache_dtype)}
        elif self.cache is not None:
            ring = self._reuses_slots()
            slots = self.window if ring and self.window else self.cache
            parts |= {"position": Position(), "cache": KeyValueCache(slots, ring=ring, param_dtype=self.cache_dtype)}
        return parts

    def with_parts(self, parts):
        """Fields in place of an edit of `attend` that they express, so that fields that are set later reach it, too."""
        attend = parts.get("attend")
        if isinstance(attend, Attention):
            fields = with_fields(self, **{name: getattr(attend, name) for name in ATTENTION_FIELDS})
            if _attention_of(fields) == attend and "attend" not in dict(self.edits):
                return Composite.with_parts(fields, {name: part for name, part in parts.items() if name != "attend"})
        return super().with_parts(parts)

    def _reuses_slots(self) -> bool:
        return self.cache is not None and self.window is not None and self.window <= self.cache

    def tensor_parallel_axes(self, number):
        shared = (self.kv_heads or self.heads) % number == 0
        if self.fused:  # a device would have parts of the heads of queries, keys and values
            return {}
        names = ("query", "key", "value") if shared else ("query",) if self.heads % number == 0 else ()
        plain = {"kernel": -1, "bias": -1}  # of a Linear in a LoRA, say, which names none
        outputs = {name: parts_of(self)[name].tensor_parallel_axes(number) or plain for name in (*names, "out")}
        axes = {f"{name}/{leaf}": axis for name in names for leaf, axis in outputs[name].items()}
        inputs = -3 - outputs["out"]["kernel"]  # the other axis of the kernel
        return {**axes, "out/kernel": inputs} if axes else {}

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

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        layer, trainables = self._fold_biases(x, trainables, inference_mode)
        layer, trainables = layer._project_jointly(x, trainables)
        return Composite.fwd(layer, x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)

    def _fold_biases(self, x: Any, trainables: Any, inference_mode: Any) -> tuple[Any, Any]:
        """On a GPU, where each bias is a pass over memory, the same function without those that act elsewhere.

        The bias of the keys changes all scores of a query alike, which a softmax ignores. That of the values changes
        every output by itself, since the weights of a query sum to 1, and so adds to the bias of `out`.
        """
        inputs = self._named_inputs(x)
        parts: Any = parts_of(self)
        is_plain = all(_is_affine(parts.get(name)) for name in ("key", "value", "out"))
        if not (is_plain and parts["value"].bias and _gpu.prefers_kernels(inputs["x"])):
            return self, trainables
        if self.cache is not None or self.sinks or self.softcap is not None:
            return self, trainables
        edits, own = {}, {**trainables}
        if self.rotary is None and self.qk_norm is None and parts["key"].bias:
            edits["key"], own["key"] = with_fields(parts["key"], bias=False), {"kernel": trainables["key"]["kernel"]}
        has_dropout = self.dropout > 0.0 and inference_mode is not True
        lengths = x.get("lengths") if isinstance(x, dict) else None
        is_full = lengths is None or (isinstance(lengths, int | np.integer) and lengths > 0)
        if is_full and inputs.keys() <= {"x", "positions", "lengths"} and not has_dropout:  # each query has a key
            value, out = (cast(trainables[name], inputs["x"].dtype) for name in ("value", "out"))
            groups = value["bias"].reshape(self.kv_heads or self.heads, -1)
            bias = jnp.repeat(groups, self.heads // groups.shape[0], axis=0).reshape(-1)
            own["value"] = {"kernel": trainables["value"]["kernel"]}
            own["out"] = {"kernel": trainables["out"]["kernel"], "bias": ops.linear(bias, **out)}
            edits |= {"value": with_fields(parts["value"], bias=False), "out": with_fields(parts["out"], bias=True)}
        return self.with_parts(edits) if edits else self, own

    def _project_jointly(self, x: Any, trainables: Any) -> tuple[Any, Any]:
        """On a GPU, the same function with queries, keys and values by `ops.linears`, for the sake of its gradients."""
        inputs, parts, names = self._named_inputs(x), parts_of(self), ("query", "key", "value")
        if inputs.keys() & {"source", "value_source"} or not all(_multiplies_alone(parts.get(name)) for name in names):
            return self, trainables
        own = {name: cast(trainables[name], inputs["x"].dtype) for name in names}
        kernels = [each["kernel"] for each in own.values()]
        if not _gpu.prefers_product_kernels(inputs["x"], kernels):
            return self, trainables
        found = ops.linears(inputs["x"], kernels, [each.get("bias") for each in own.values()])
        own = {name: {"y": y} for name, y in zip(names, found, strict=True)}
        return self.with_parts(dict.fromkeys(names, _Computed())), {**trainables, **own}

    def split_bias(self, x, trainables, inference_mode):
        layer, trainables = self._fold_biases(x, trainables, inference_mode)
        found = parts_of(layer)["out"].split_bias(self._named_inputs(x)["x"], trainables["out"], inference_mode)
        if found is None or self.return_weights:
            return None
        out, rest, bias = found
        return layer.with_parts({"out": out}), {**trainables, "out": rest}, bias

    def wire(self, sub: Sub, x: Any) -> Any:
        inputs = self._named_inputs(x)
        x = inputs["x"]
        joint = jnp.split(sub.qkv(x), self._joint_places(), axis=-1) if self.fused else (None, None, None)
        q = self._split_heads(sub.query(x) if joint[0] is None else joint[0], self.head_width)
        q = q if self.qk_norm is None else sub.query_norm(q)
        if self.cross and self.cache is not None:
            return self._attend_to_stored(sub, q, inputs)
        k, v = self._keys_and_values(sub, inputs, *joint[1:])
        order = None if self.cache is None else sub.position((x, inputs["lengths"]) if "lengths" in inputs else x)
        query_positions = key_positions = inputs.get("positions", order)
        if "source" in inputs:
            key_positions = None
        if self.rotary is not None:
            q = sub.rotary(q if query_positions is None else (q, query_positions))
            k = sub.rotary(k if key_positions is None else (k, key_positions))
        if self.cache is not None:
            stored = {name: inputs[name] for name in ("lengths", "segments") if name in inputs}
            cached = sub.cache({"key": k, "value": v, "positions": order, **stored})
            k, v = cached["key"], cached["value"]
            inputs = self._over_slots(inputs, order, cached)
        if self.relative is not None:
            queries, keys = (
                inputs.get(name, jnp.arange(time, dtype=np.int32)[None])
                for name, time in (("query_positions", q.shape[1]), ("key_positions", k.shape[1]))
            )
            relative = sub.relative((queries, keys))
            inputs["bias"] = relative + inputs["bias"] if "bias" in inputs else relative
        return self._attend(sub, q, k, v, inputs)

    def _joint_places(self) -> tuple[int, int]:
        """Where keys and values begin in the output of the one product of `fused`."""
        width: Any = self.head_width
        queries = self.heads * width
        return queries, queries + (self.kv_heads or self.heads) * width

    def _keys_and_values(self, sub: Sub, inputs: dict[str, Any], k: Any = None, v: Any = None) -> tuple[Any, Any]:
        """Those of the source, or of x itself: (b, s, g, k) and (b, s, g, w)."""
        source = inputs.get("source", inputs["x"])
        value_source = inputs.get("value_source", source)
        if _gpu.prefers_kernels(source) and not inputs.keys() & {"source", "value_source"}:
            # else XLA computes two of the three products at once, for which it joins their gradients by a copy
            source, value_source = lax.optimization_barrier((source, source))
        k = self._split_heads(sub.key(source) if k is None else k, self.head_width)
        v = sub.value(value_source) if v is None else v
        v = self._split_heads(v, self.value_width or self.head_width)
        return k if self.qk_norm is None else sub.key_norm(k), v

    def _attend_to_stored(self, sub: Sub, q: Any, inputs: dict[str, Any]) -> Any:
        """Attend to the source of this call, which is stored, or of an earlier one."""
        new = {name: inputs[name] for name in ("lengths",) if name in inputs}
        if "source" in inputs:
            new["key"], new["value"] = self._keys_and_values(sub, inputs)
        stored = sub.cache({"query": q, **new})
        return self._attend(sub, q, stored["key"], stored["value"], {**inputs, "lengths": stored["lengths"]})

    def _attend(self, sub: Sub, q: Any, k: Any, v: Any, inputs: dict[str, Any]) -> Any:
        optional = {name: inputs[name] for name in OPTIONAL_INPUTS if name in inputs}
        if isinstance(lengths := optional.get("lengths"), np.ndarray) and lengths.size:
            optional["lengths"] = lengths[0]  # one for all rows: as a scalar its value is known in the part, too
        y = sub.attend({"query": q, "key": k, "value": v, **optional})  # (b, t, h, k)
        if not self.return_weights:
            return sub.out(lax.collapse(y, 2))
        return {**y, "y": sub.out(lax.collapse(y["y"], 2))}

    def _over_slots(self, inputs: dict[str, Any], order: Any, cached: dict[str, Any]) -> dict[str, Any]:
        """The inputs of attention to the slots of the cache, whose padding is not stored."""
        slots = cached["key"].shape[1]
        inputs = {name: each for name, each in inputs.items() if name != "lengths"}
        inputs |= {"query_positions": order, "key_positions": cached["positions"]}
        if "segments" in inputs:
            inputs["source_segments"] = cached["segments"]
        for name, fill in (("mask", True), ("bias", 0)):
            missing = slots - inputs[name].shape[-1] if name in inputs else 0
            if missing > 0 and inputs[name].shape[-1] > 1:
                widths = [(0, 0)] * 3 + [(0, missing)]
                inputs[name] = jnp.pad(inputs[name], widths, constant_values=fill)
        return inputs

    def _linear(self, features: int | None, bias: bool) -> Linear:
        return Linear(
            features,  # pyright: ignore[reportArgumentType]
            bias=bias,
            kernel_init=self.kernel_init,
            precision=self.precision,
            param_dtype=self.param_dtype,
        )

    def _split_heads(self, x: Any, width: Any) -> Any:
        """(b, t, h * k) as (b, t, h, k)."""
        return x.reshape(*x.shape[:2], x.shape[2] // width, width)

    def _named_inputs(self, x: Any) -> dict[str, Any]:
        """The input as a dict: from an array, a pair or a dict."""
        name, arrays = type(self).__name__, x if isinstance(x, tuple) else (x,)
        pairs = x.items() if isinstance(x, dict) else zip(MULTI_HEAD_INPUTS, arrays, strict=False)
        inputs: dict[str, Any] = {each: array for each, array in pairs if array is not None or not isinstance(x, dict)}
        unknown = ", ".join(inputs.keys() - set(MULTI_HEAD_INPUTS))
        if unknown or "x" not in inputs or (isinstance(x, tuple) and len(x) != 2):
            raise ValueError(
                f"{name}: the input must be an array x, a pair (x, source), or a dict of x and any of "
                f"{', '.join(MULTI_HEAD_INPUTS[1:])}, but {f'has {unknown}' if unknown else 'is none of these'}."
            )
        if "lengths" in inputs and jnp.ndim(inputs["lengths"]) == 0:
            inputs["lengths"] = repeat_length(inputs["lengths"], inputs["x"].shape[0])
        for each in ("x", "source", "value_source"):
            if each in inputs and inputs[each].ndim != 3:
                raise ValueError(f"{name}: {each} is {inputs[each].shape}, but must be (batch, time, width).")
            if each in inputs and inputs[each].shape[0] != inputs["x"].shape[0]:
                shapes = f"x is {inputs['x'].shape} and {each} {inputs[each].shape}"
                raise ValueError(f"{name}: {shapes}, but their batches must be equal.")
        if ("segments" in inputs) != ("source_segments" in inputs) and inputs.keys() & {"source", "source_segments"}:
            has, lacks = ("segments", "source_segments")[:: 1 if "segments" in inputs else -1]
            raise ValueError(f"{name}: the input has {has} but not {lacks}; with a source pass both.")
        if "positions" in inputs and self.rotary is None:
            raise ValueError(f"{name}: positions are for rotary embeddings only; pass rotary=, or leave them out.")
        if self.fused and inputs.keys() & {"source", "value_source"}:
            raise ValueError(f"{name}: with fused=True x attends to itself, but the input has a source.")
        if self.cross:
            self._check_cross_inputs(inputs)
        elif self.cache is not None:
            self._check_cache_inputs(inputs)
        return inputs

    def _check_cross_inputs(self, inputs: dict[str, Any]) -> None:
        name = type(self).__name__
        if "source" not in inputs and self.cache is None:
            raise ValueError(f"{name}: with cross=True x attends to a source; pass (x, source), or a dict of both.")
        without = [each for each in ("value_source", "lengths") if each in inputs and "source" not in inputs]
        if without:
            raise ValueError(f"{name}: the input has {without[0]} but no source; the stored source has its own.")
        if self.cache is not None and "segments" in inputs:
            raise ValueError(f"{name}: a cached source cannot have segments; pass a mask, or leave the cache out.")

    def _check_cache_inputs(self, inputs: dict[str, Any]) -> None:
        name = type(self).__name__
        sources = ", ".join(each for each in SOURCES if each in inputs)
        if sources:
            raise ValueError(
                f"{name}: with a cache x attends to itself and earlier tokens, but the input has {sources}."
            )
        over_keys = [each for each in ("mask", "bias") if each in inputs and inputs[each].shape[-1] != 1]
        if over_keys and self._reuses_slots():
            raise ValueError(
                f"{name}: with window={self.window} and cache={self.cache} old tokens are overwritten, so a "
                f"{over_keys[0]} of the keys has no meaning; use segments, or a cache smaller than the window."
            )
        if "lengths" in inputs:
            b, t = inputs["x"].shape[:2]
            ops.check_lengths(name, inputs["lengths"], b, t, "tokens")


@frozen
class _Computed(Layer):
    """A part whose output is computed before it is called: the array `y` among its variables."""

    def init(self, rng, x):
        return None, None

    def check_variables(self, x: Any, trainables: Any, non_trainables: Any) -> None:
        pass

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return trainables["y"], non_trainables


def _multiplies_alone(part: Any) -> bool:
    """Whether a part is a product in the dtype of its input, with or without a bias."""
    return _is_affine(part) and (part.precision, part.accum_dtype) == (None, None)


def _is_affine(part: Any) -> bool:
    """Whether a part computes `x @ kernel + bias`; a subclass may compute anything."""
    return type(part) is Linear and part.activation is None


def _attention_of(layer: MultiHeadAttention) -> Attention:
    """The part that attends; a function, since methods need a finished description and `__post_init__` calls it."""
    fields = (*ATTENTION_FIELDS, "precision", "param_dtype")
    return Attention(**{name: getattr(layer, name) for name in fields})


def _with_features(edited: Layer, part: Layer) -> Layer:
    """A part put in by surgery, with the features that are inferred from the input."""
    if isinstance(edited, Wrapper):
        return with_fields(edited, layer=_with_features(edited.layer, part))
    if isinstance(edited, Linear) and isinstance(part, Linear) and edited.features is None:
        return with_fields(edited, features=part.features)
    return edited
