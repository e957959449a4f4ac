"""T5: an encoder-decoder transformer with relative positions. Raffel et al., Exploring the Limits of Transfer Learning
with a Unified Text-to-Text Transformer, https://arxiv.org/abs/1910.10683.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mlax import nn, ops
from mlax.core import Composite, Layer, Normal, Repeat, Size, Sub, frozen, replace, short_repr, signature, with_fields
from mlax.zoo._config import Config
from mlax.zoo._language import last_tokens
from mlax.zoo._weights import Weight, WeightMap, map_embed, map_linear, map_norm

FeedForward = Literal["relu", "gated-gelu", "gated-silu"]


@frozen
class T5(Composite):
    """T5, an encoder-decoder (sequence-to-sequence) language model: tokens (b, t) of the target, integers, and those of
    the source (b, s) to the logits (b, t, vocabulary) of each next token of the target.

    The input is the tuple (tokens, lengths, source, source_lengths), the target first as in every language model here:
    lengths (b,) say how many tokens of a row are not padding, which is on the right, and may be None. A target starts
    with the token 0. With None in place of tokens the output is the encoded source, (b, s, width), and that may be
    passed in place of the source. In a `zoo.decoder` later calls pass the tokens alone. With a fifth entry, labels
    (b, t), the tokens that come next, the output is their losses (b, t), as `nn.CrossEntropyHead` computes them.
    Parts: embed, encode, decode, and head unless `tied`.

    >>> model = zoo.T5(vocabulary=50, width=8, depth=2, heads=2, head_width=4, hidden=16)
    >>> target, source = jnp.zeros((3, 5), "int32"), jnp.zeros((3, 7), "int32")
    >>> trainables, _ = model.init(jax.random.key(0), (target, None, source))
    >>> model.fwd((target, None, source, jnp.array([7, 4, 1])), trainables)[0].shape
    (3, 5, 50)
    """

    _: KW_ONLY
    vocabulary: Size = 32_128  # the number of tokens
    width: Size = 512  # of the residual stream
    depth: Size = 6  # the number of blocks of the encoder
    decoder_depth: int | None = None  # of the decoder; None: like the encoder
    heads: Size = 8  # of each attention
    head_width: Size = 64  # of a head
    hidden: Size = 2048  # the width inside of a feed-forward layer
    feed_forward: FeedForward = "relu"  # "relu", "gated-gelu" (v1.1, Flan) or "gated-silu" (UL2)
    tied: bool = True  # whether the table of embed is the output layer, too; in v1.1 and Flan it is not
    scaled: bool = True  # whether the output layer gets vectors times width**-0.5; in v1.1 and Flan it does not
    buckets: Size = 32  # of distances between tokens
    farthest: Size = 128  # distance from which all share the last bucket
    dropout: float = 0.0  # of embeddings, attention weights, hidden features and residual branches
    eps: float = 1e-6  # of the norms
    last_only: bool = False  # whether to compute the logits of the last token of each row alone, (b, 1, vocabulary)

    def parts(self):
        fields = {name: getattr(self, name) for name in BLOCK_FIELDS}
        encoder = Repeat(T5EncoderBlock(**fields), self.depth)
        decoder = Repeat(T5DecoderBlock(**fields), self.decoder_depth or self.depth)
        embed = nn.Embed(self.vocabulary, self.width, table_init=Normal(1.0))
        parts = {
            "embed": nn.CrossEntropyHead(embed) if self.tied else embed,
            "encode": self._stack(encoder, bidirectional=True),
            "decode": self._stack(decoder, bidirectional=False),
        }
        return parts if self.tied else {**parts, "head": nn.CrossEntropyHead(nn.Linear(self.vocabulary, bias=False))}

    def _stack(self, blocks: Repeat, *, bidirectional: bool) -> "T5Stack":
        return T5Stack(
            blocks=blocks,
            relative=nn.RelativeBias(
                self.heads,
                buckets=self.buckets,
                farthest=self.farthest,
                bidirectional=bidirectional,
                table_init=Normal(self.width**-0.5),
            ),
            norm=nn.RMSNorm(eps=self.eps),
            drop=nn.Dropout(self.dropout),
        )

    def init(self, rng, x):
        """With an encoded source, the encoder is initialized for the tokens that it may have been."""
        if not isinstance(x, tuple) or len(x) < 3 or x[0] is None or x[2] is None:
            raise ValueError(f"{short_repr(self)}: init needs tokens and a source: (tokens, lengths, source).")
        tokens, lengths, source, *rest = x
        if jnp.issubdtype(source.dtype, jnp.floating):
            source = jax.ShapeDtypeStruct(source.shape[:2], np.int32)
        return super().init(rng, (tokens, lengths, source, *rest))

    def wire(
        self,
        sub: Sub,
        tokens: Any,
        lengths: Any = None,
        source: Any = None,
        source_lengths: Any = None,
        labels: Any = None,
    ) -> Any:
        self._check_inputs(tokens, lengths, source)
        if source is not None and not jnp.issubdtype(source.dtype, jnp.floating):
            source = sub.encode(sub.embed(source), source_lengths)  # (b, s, d)
        if tokens is None:
            return source
        x = sub.decode(sub.embed(tokens), lengths, source, source_lengths)  # (b, t, d)
        x = last_tokens(x, lengths) if self.last_only and labels is None else x
        x = x * self.width**-0.5 if self.scaled else x
        x = x if labels is None else {"x": x, "labels": labels, "lengths": lengths}
        return sub.embed(x) if self.tied else sub.head(x)  # (b, t, v), or (b, t)

    def _check_inputs(self, tokens: Any, lengths: Any, source: Any) -> None:
        wanted = "the input is (tokens, lengths, source, source_lengths), with the tokens of the target first"
        if lengths is not None and lengths.ndim != 1:
            raise ValueError(f"{short_repr(self)}: lengths are {signature(lengths)}, but must be (b,); {wanted}.")
        if tokens is None and source is None:
            raise ValueError(f"{short_repr(self)}: there are neither tokens nor a source; {wanted}.")

    def example_input(self) -> Any:
        tokens = jax.ShapeDtypeStruct((1, 1), np.int32)
        return tokens, None, tokens

    def weight_map(self) -> WeightMap:
        gated = self.feed_forward != "relu"
        tied = {f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")}
        return WeightMap(
            {
                **map_embed("embed", "shared"),
                **_map_stack("encode", "encoder", gated, {"attend": "layer.0.SelfAttention", "feed": "layer.1"}),
                **_map_stack("decode", "decoder", gated, DECODER_MODULES),
                **map_linear("head", "lm_head"),
            },
            ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),  # unused
            tied={**tied, "lm_head.weight": "shared.weight"} if self.tied else tied,
        )

    def config(self) -> dict[str, Any]:
        """The config.json of Hugging Face's transformers."""
        return {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "vocab_size": self.vocabulary,
            "d_model": self.width,
            "d_kv": self.head_width,
            "d_ff": self.hidden,
            "num_layers": self.depth,
            "num_decoder_layers": self.decoder_depth or self.depth,
            "num_heads": self.heads,
            "relative_attention_num_buckets": self.buckets,
            "relative_attention_max_distance": self.farthest,
            "dropout_rate": self.dropout,
            "layer_norm_epsilon": self.eps,
            "feed_forward_proj": self.feed_forward,
            "tie_word_embeddings": self.tied,
            "scale_decoder_outputs": self.scaled,
            "is_encoder_decoder": True,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        }


@frozen
class T5Stack(Composite):
    """The encoder or the decoder of T5: blocks that share one relative position bias, and a norm."""

    _: KW_ONLY
    blocks: Layer  # a Repeat of T5EncoderBlock or T5DecoderBlock
    relative: Layer  # the bias of every block
    norm: Layer  # of the output
    drop: Layer  # dropout of the input and the output

    def wire(self, sub: Sub, x: Any, lengths: Any, *source: Any) -> Any:  # (b, t, d), (b,)
        bias = sub.relative({"x": x, "lengths": lengths})  # (1, h, t, t)
        x = sub.blocks(sub.drop(x), bias, lengths, *source)
        return sub.drop(sub.norm(x))


BLOCK_FIELDS = ("width", "heads", "head_width", "hidden", "feed_forward", "dropout", "eps")


@frozen
class T5EncoderBlock(Composite):
    """A block of T5's encoder: self-attention and a feed-forward layer, each after a norm, added to x."""

    _: KW_ONLY
    width: Size  # of the residual stream
    heads: Size  # of the attention
    head_width: Size  # of a head
    hidden: Size  # the width inside of the feed-forward layer
    feed_forward: FeedForward = "relu"  # its kind
    dropout: float = 0.0  # of attention weights, hidden features and residual branches
    eps: float = 1e-6  # of the norms

    def parts(self):
        return {
            "norm1": nn.RMSNorm(eps=self.eps),
            "attend": _attention(self),
            "feed": T5FeedForward(**{name: getattr(self, name) for name in FEED_FIELDS}),
            "drop": nn.Dropout(self.dropout),
        }

    def wire(self, sub: Sub, x: Any, bias: Any, lengths: Any = None) -> Any:  # (b, s, d), (1, h, s, s), (b,)
        x = x + sub.drop(sub.attend({"x": sub.norm1(x), "bias": bias, "lengths": lengths}))
        return x + sub.drop(sub.feed(x))


@frozen
class T5DecoderBlock(Composite):
    """A block of T5's decoder: causal self-attention, cross-attention and a feed-forward layer."""

    _: KW_ONLY
    width: Size  # of the residual stream
    heads: Size  # of each attention
    head_width: Size  # of a head
    hidden: Size  # the width inside of the feed-forward layer
    feed_forward: FeedForward = "relu"  # its kind
    dropout: float = 0.0  # of attention weights, hidden features and residual branches
    eps: float = 1e-6  # of the norms

    def parts(self):
        return {
            "norm1": nn.RMSNorm(eps=self.eps),
            "attend": _attention(self, causal=True),
            "norm2": nn.RMSNorm(eps=self.eps),
            "cross": _attention(self, cross=True),
            "feed": T5FeedForward(**{name: getattr(self, name) for name in FEED_FIELDS}),
            "drop": nn.Dropout(self.dropout),
        }

    def wire(self, sub: Sub, x: Any, bias: Any, lengths: Any, source: Any, source_lengths: Any) -> Any:
        x = x + sub.drop(sub.attend({"x": sub.norm1(x), "bias": bias, "lengths": lengths}))  # (b, t, d)
        x = x + sub.drop(sub.cross({"x": sub.norm2(x), "source": source, "lengths": source_lengths}))
        return x + sub.drop(sub.feed(x))


def _attention(
    block: T5EncoderBlock | T5DecoderBlock, *, causal: bool = False, cross: bool = False
) -> nn.MultiHeadAttention:
    """Attention without biases and without a scale, for which the initial queries are smaller."""
    query_init = Normal((block.width * block.head_width) ** -0.5)
    attention = nn.MultiHeadAttention(
        block.heads,
        head_width=block.head_width,
        causal=causal,
        cross=cross,
        bias=False,
        scale=1.0,
        dropout=block.dropout,
    )
    return replace(attention, "query", nn.Linear(block.heads * block.head_width, bias=False, kernel_init=query_init))


FEED_FIELDS = ("width", "hidden", "feed_forward", "dropout", "eps")


@frozen
class T5FeedForward(Composite):
    """A feed-forward layer of T5 after a norm: relu, or a gated linear unit."""

    _: KW_ONLY
    width: Size  # of the residual stream
    hidden: Size  # inside
    feed_forward: FeedForward = "relu"  # the activation, and whether it is that of a gate
    dropout: float = 0.0  # of the hidden features
    eps: float = 1e-6  # of the norm

    def parts(self):
        parts = {
            "norm": nn.RMSNorm(eps=self.eps),
            "up": nn.Linear(self.hidden, bias=False),
            "down": nn.Linear(self.width, bias=False),
            "drop": nn.Dropout(self.dropout),
        }
        return parts if self.feed_forward == "relu" else {**parts, "gate": nn.Linear(self.hidden, bias=False)}

    def wire(self, sub: Sub, x: Any) -> Any:  # (b, t, d)
        x = sub.norm(x)
        if self.feed_forward == "relu":
            hidden = jax.nn.relu(sub.up(x))  # (b, t, f)
        else:
            activation = ops.gelu if self.feed_forward == "gated-gelu" else jax.nn.silu
            hidden = activation(sub.gate(x)) * sub.up(x)
        return sub.down(sub.drop(hidden))


T5Size = Literal["small", "base", "large", "3b", "11b", "v1.1-small", "v1.1-base", "v1.1-large", "v1.1-xl", "v1.1-xxl"]


def t5(size: T5Size = "small") -> T5:
    """T5 in a published size: small, base, large, 3b or 11b, from 60M to 11B parameters, or of version 1.1, which is
    that of Flan-T5, too: v1.1-small, v1.1-base, v1.1-large, v1.1-xl or v1.1-xxl, from 77M to 11B.

    >>> zoo.t5("base")
    T5(width=768, depth=12, heads=12, hidden=3072)
    """
    sizes = {  # width, depth, heads, head_width, hidden
        "small": (512, 6, 8, 64, 2048),
        "base": (768, 12, 12, 64, 3072),
        "large": (1024, 24, 16, 64, 4096),
        "3b": (1024, 24, 32, 128, 16_384),
        "11b": (1024, 24, 128, 128, 65_536),
        "v1.1-small": (512, 8, 6, 64, 1024),
        "v1.1-base": (768, 12, 12, 64, 2048),
        "v1.1-large": (1024, 24, 16, 64, 2816),
        "v1.1-xl": (2048, 24, 32, 64, 5120),
        "v1.1-xxl": (4096, 24, 64, 64, 10_240),
    }
    if size not in sizes:
        raise ValueError(f"t5: the size is {size!r}, but must be one of {', '.join(sizes)}.")
    width, depth, heads, head_width, hidden = sizes[size]
    model = T5(width=width, depth=depth, heads=heads, head_width=head_width, hidden=hidden)
    return with_fields(model, feed_forward="gated-gelu", tied=False, scaled=False) if size.startswith("v1.1") else model


DECODER_MODULES = {"attend": "layer.0.SelfAttention", "cross": "layer.1.EncDecAttention", "feed": "layer.2"}
NORMS = {"attend": "norm1", "cross": "norm2", "feed": "feed/norm"}  # the norm before each part of a block


def _map_stack(path: str, module: str, gated: bool, modules: Mapping[str, str]) -> dict[Any, Weight]:
    """The entries of a stack, given the modules of the parts of a block."""
    table = f"{module}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    entries = {f"{path}/relative/table": Weight(table), **map_norm(f"{path}/norm", f"{module}.final_layer_norm")}
    for part, inner in modules.items():
        block, layer = f"{path}/blocks/stacked", f"{module}.block.*.{inner}"
        entries |= map_norm(f"{block}/{NORMS[part]}", f"{module}.block.*.{inner[:7]}.layer_norm")
        names = {"query": "q", "key": "k", "value": "v", "out": "o"}
        if part == "feed":
            names = {"gate": "wi_0", "up": "wi_1" if gated else "wi", "down": "wo"}
            names = {each: f"DenseReluDense.{name}" for each, name in names.items()}
        for each, name in names.items():
            entries |= map_linear(f"{block}/{part}/{each}", f"{layer}.{name}")
    return entries


def t5_from_config(config: Mapping[str, Any]) -> T5:
    """The T5 that a config.json of Hugging Face describes; `zoo.load` sees by the weights whether it is `tied`."""
    fields = Config("t5", config)
    tied = fields.flag("tie_word_embeddings", True)
    fields.require("is_encoder_decoder", True, default=True)
    kinds: dict[str, FeedForward] = {"relu": "relu", "gated-gelu": "gated-gelu", "gated-silu": "gated-silu"}
    return T5(
        vocabulary=fields.size("vocab_size", 32_128),
        width=fields.size("d_model", 512),
        depth=fields.size("num_layers", 6),
        decoder_depth=fields.optional_size("num_decoder_layers", None),
        heads=fields.size("num_heads", 8),
        head_width=fields.size("d_kv", 64),
        hidden=fields.size("d_ff", 2048),
        feed_forward=fields.choice("feed_forward_proj", kinds, "relu"),
        tied=tied,
        scaled=fields.flag("scale_decoder_outputs", tied),  # transformers before 5 have one field for both
        buckets=fields.size("relative_attention_num_buckets", 32),
        farthest=fields.size("relative_attention_max_distance", 128),
        dropout=fields.number("dropout_rate", 0.1),
        eps=fields.number("layer_norm_epsilon", 1e-6),
    )
