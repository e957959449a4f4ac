"""BERT: a transformer encoder of text, with RoBERTa and MiniLM as variations. https://arxiv.org/abs/1810.04805,
https://arxiv.org/abs/1907.11692, https://arxiv.org/abs/2002.10957.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mlax import nn, ops
from mlax._jax import is_static
from mlax.core import Composite, Normal, Repeat, Size, Sub, frozen, short_repr
from mlax.zoo._config import Config
from mlax.zoo._weights import Weight, WeightMap, map_embed, map_linear, map_norm


@frozen
class BERT(Composite):
    """BERT, an encoder: tokens (b, t), integers, to hidden states (b, t, width).

    The input may also be a tuple with lengths (b,), how many tokens of each row are not padding, which is on the right,
    and segments (b, t), integers: the token types, 0 and 1 for the two texts of a pair. With `padding`, it is RoBERTa.
    With `pooler`, the output is a dict of hidden, (b, t, width), and pooled, (b, width), from the first token;
    a model of `zoo.load` has none. Parts: embed, segments, positions, norm, drop, blocks; pooler.

    >>> model = zoo.BERT(vocabulary=50, positions=16, width=8, depth=2, heads=2)
    >>> trainables, _ = model.init(jax.random.key(0), jnp.zeros((1, 5), "int32"))
    >>> model.fwd((jnp.zeros((3, 7), "int32"), jnp.array([7, 2, 5])), trainables)[0].shape
    (3, 7, 8)
    """

    _: KW_ONLY
    vocabulary: Size = 30_522  # the number of tokens
    positions: Size = 512  # the number of rows of the table of positions
    segments: Size = 2  # the number of segments (token types)
    width: Size = 768  # of the residual stream
    depth: Size = 12  # the number of blocks
    heads: Size = 12  # of each attention
    hidden: Size | None = None  # the width of the hidden layer of each MLP; None: 4 * width
    padding: int | None = None  # RoBERTa's padding token, after whose index positions start; None: they start at 0
    pooler: bool = False  # whether to pool the first token by a Linear and a tanh
    dropout: float = 0.0  # of embeddings, attention weights and residual branches
    eps: float = 1e-12  # of the norms

    def __post_init__(self):
        if self.padding is not None and not 0 <= self.padding < self.positions - 1:
            raise ValueError(
                f"BERT: padding is {self.padding}, but must be a token from 0 to {self.positions - 2}, since positions "
                f"start after it, and there are {self.positions}."
            )

    def parts(self):
        hidden = 4 * self.width if self.hidden is None else self.hidden
        block = BERTBlock(width=self.width, heads=self.heads, hidden=hidden, dropout=self.dropout, eps=self.eps)
        pooler = {"pooler": nn.Linear(self.width, kernel_init=Normal(0.02))} if self.pooler else {}
        return {
            "embed": nn.Embed(self.vocabulary, self.width),
            "segments": nn.Embed(self.segments, self.width),
            "positions": nn.LearnedPositions(self.positions),
            "norm": nn.LayerNorm(eps=self.eps),
            "drop": nn.Dropout(self.dropout),
            "blocks": Repeat(block, self.depth),
            **pooler,
        }

    def wire(self, sub: Sub, tokens: Any, lengths: Any = None, segments: Any = None) -> Any:  # (b, t), (b,), (b, t)
        x = sub.embed(tokens) + sub.segments(jnp.zeros_like(tokens) if segments is None else segments)  # (b, t, d)
        x = sub.drop(sub.norm(sub.positions(x, self._positions(tokens.shape[1]))))
        x = sub.blocks(x, lengths)
        return {"hidden": x, "pooled": jnp.tanh(sub.pooler(x[:, 0]))} if self.pooler else x

    def _positions(self, time: Any) -> Any:  # (t,)
        start = 0 if self.padding is None else self.padding + 1
        if is_static(time) and time > self.positions - start:
            raise ValueError(
                f"{short_repr(self)}: the texts have {time} tokens, but at most {self.positions - start} are possible; "
                "truncate them, by max_length= of a tokenizer."
            )
        return ops.default_positions(time) + np.int32(start)

    @property
    def family(self) -> Literal["bert", "roberta"]:
        """The model_type of Hugging Face."""
        return "bert" if self.padding is None else "roberta"

    def example_input(self) -> Any:
        return jax.ShapeDtypeStruct((1, 1), np.int32)

    def weight_map(self) -> WeightMap:
        heads, pooler = ("cls.*", "lm_head.*", "classifier.*"), f"{self.family}.pooler"
        if self.pooler:
            return _map_weights(self.family, map_linear("pooler", f"{pooler}.dense"), other_heads=heads)
        return _map_weights(self.family, {}, other_heads=(f"{pooler}.*", *heads))

    def config(self) -> dict[str, Any]:
        """The config.json of Hugging Face's transformers."""
        return {
            "model_type": self.family,
            "architectures": [ARCHITECTURES[self.family, "BERT"]],
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "type_vocab_size": self.segments,
            "hidden_size": self.width,
            "num_hidden_layers": self.depth,
            "num_attention_heads": self.heads,
            "intermediate_size": 4 * self.width if self.hidden is None else self.hidden,
            "hidden_dropout_prob": self.dropout,
            "attention_probs_dropout_prob": self.dropout,
            "layer_norm_eps": self.eps,
            "hidden_act": "gelu",
            "pad_token_id": 0 if self.padding is None else self.padding,
        }


@frozen
class BERTBlock(Composite):
    """A block of BERT: attention and an MLP, each added to the residual stream and followed by a layer norm."""

    _: KW_ONLY
    width: Size  # of the residual stream
    heads: Size  # of the attention
    hidden: Size  # the width of the hidden layer of the MLP
    dropout: float = 0.0  # of attention weights and residual branches
    eps: float = 1e-12  # of the norms

    def parts(self):
        return {
            "attend": nn.MultiHeadAttention(self.heads, dropout=self.dropout, kernel_init=Normal(0.02)),
            "norm1": nn.LayerNorm(eps=self.eps),
            "up": nn.Linear(self.hidden, activation=ops.exact_gelu, kernel_init=Normal(0.02)),
            "down": nn.Linear(self.width, kernel_init=Normal(0.02)),
            "norm2": nn.LayerNorm(eps=self.eps),
            "drop": nn.Dropout(self.dropout),
        }

    def wire(self, sub: Sub, x: Any, lengths: Any = None) -> Any:  # (b, t, d), (b,)
        x = sub.norm1(x + sub.drop(sub.attend({"x": x, "lengths": lengths})))
        return sub.norm2(x + sub.drop(sub.call_in_turn(x, "up", "down")))


@frozen
class BERTMaskedLM(Composite):
    """BERT as a masked language model: tokens (b, t) to the logits (b, t, vocabulary) of each token.

    Inputs are as in BERT. Parts: those of `encoder`, whose embedding is the output layer, too, under the same paths;
    transform, head_norm and bias.

    >>> model = zoo.BERTMaskedLM(zoo.BERT(vocabulary=50, positions=16, width=8, depth=2, heads=2))
    >>> trainables, _ = model.init(jax.random.key(0), jnp.zeros((1, 5), "int32"))
    >>> model.fwd(jnp.zeros((3, 7), "int32"), trainables)[0].shape
    (3, 7, 50)
    """

    encoder: BERT  # without a pooler

    def __post_init__(self):
        _check_no_pooler(self)

    def parts(self):
        return {
            **self.encoder.parts(),
            "transform": nn.Linear(self.encoder.width, activation=ops.exact_gelu, kernel_init=Normal(0.02)),
            "head_norm": nn.LayerNorm(eps=self.encoder.eps),
            "bias": nn.Bias(),
        }

    def wire(self, sub: Sub, tokens: Any, lengths: Any = None, segments: Any = None) -> Any:
        x = self.encoder.wire(sub, tokens, lengths, segments)  # (b, t, d)
        x = sub.head_norm(sub.transform(x))
        return sub.bias(sub.embed(x))  # (b, t, v)

    def example_input(self) -> Any:
        return self.encoder.example_input()

    def weight_map(self) -> WeightMap:
        family = self.encoder.family
        head, transform, norm = ("lm_head", "lm_head", "layer_norm")
        if family == "bert":
            head, transform, norm = ("cls.predictions", "cls.predictions.transform", "LayerNorm")
        entries = {
            **map_linear("transform", f"{transform}.dense"),
            **map_norm("head_norm", f"{transform}.{norm}"),
            "bias/bias": Weight(f"{head}.bias"),
        }
        tied = {
            f"{head}.decoder.weight": f"{family}.embeddings.word_embeddings.weight",
            f"{head}.decoder.bias": f"{head}.bias",
        }
        return _map_weights(family, entries, other_heads=(f"{family}.pooler.*", "cls.seq_relationship.*"), tied=tied)

    def config(self) -> dict[str, Any]:
        """The config.json of Hugging Face's transformers."""
        return {**self.encoder.config(), "architectures": [ARCHITECTURES[self.encoder.family, "BERTMaskedLM"]]}


@frozen
class BERTClassifier(Composite):
    """BERT as a classifier of texts or pairs of texts: tokens (b, t) to logits (b, classes).

    Inputs are as in BERT. Parts: those of `encoder`, under the same paths; pooler, of the first token, and head.

    >>> model = zoo.BERTClassifier(zoo.BERT(vocabulary=50, positions=16, width=8, depth=2, heads=2), classes=3)
    >>> trainables, _ = model.init(jax.random.key(0), jnp.zeros((1, 5), "int32"))
    >>> model.fwd(jnp.zeros((4, 7), "int32"), trainables)[0].shape
    (4, 3)
    """

    encoder: BERT  # without a pooler
    _: KW_ONLY
    classes: Size = 2  # the number of classes

    def __post_init__(self):
        _check_no_pooler(self)

    def parts(self):
        return {
            **self.encoder.parts(),
            "pooler": nn.Linear(self.encoder.width, kernel_init=Normal(0.02)),
            "head": nn.Linear(self.classes, kernel_init=Normal(0.02)),
        }

    def wire(self, sub: Sub, tokens: Any, lengths: Any = None, segments: Any = None) -> Any:
        x = self.encoder.wire(sub, tokens, lengths, segments)  # (b, t, d)
        return sub.head(sub.drop(jnp.tanh(sub.pooler(x[:, 0]))))  # (b, classes)

    def example_input(self) -> Any:
        return self.encoder.example_input()

    def weight_map(self) -> WeightMap:
        family = self.encoder.family
        if family == "bert":
            entries = map_linear("pooler", "bert.pooler.dense") | map_linear("head", "classifier")
        else:
            entries = map_linear("pooler", "classifier.dense") | map_linear("head", "classifier.out_proj")
        return _map_weights(family, entries, other_heads=("cls.*", "lm_head.*", "roberta.pooler.*"))

    def config(self) -> dict[str, Any]:
        """The config.json of Hugging Face's transformers."""
        architecture = ARCHITECTURES[self.encoder.family, "BERTClassifier"]
        labels = {str(index): f"LABEL_{index}" for index in range(self.classes)}
        return {**self.encoder.config(), "architectures": [architecture], "id2label": labels}


def bert(size: Literal["base", "large"] = "base") -> BERT:
    """BERT in a published size: 109M or 335M parameters, without a pooler.

    >>> zoo.bert("large")
    BERT(width=1024, depth=24, heads=16)
    """
    width, depth, heads = _size("bert", size)
    return BERT(width=width, depth=depth, heads=heads)


def roberta(size: Literal["base", "large"] = "base") -> BERT:
    """RoBERTa in a published size: 124M or 355M parameters, without a pooler.

    >>> zoo.roberta()
    BERT(vocabulary=50265, positions=514, segments=1, padding=1, eps=1e-05)
    """
    width, depth, heads = _size("roberta", size)
    base = BERT(vocabulary=50_265, positions=514, segments=1, padding=1, eps=1e-5)
    return dataclasses.replace(base, width=width, depth=depth, heads=heads)


def minilm() -> BERT:
    """MiniLM, a small BERT for sentence embeddings: 22.6M parameters in 6 blocks.

    >>> zoo.minilm()
    BERT(width=384, depth=6)
    """
    return BERT(width=384, depth=6)


def _size(family: str, size: str) -> tuple[int, int, int]:
    sizes = {"base": (768, 12, 12), "large": (1024, 24, 16)}
    if size not in sizes:
        raise ValueError(f"{family}: the size is {size!r}, but must be one of {', '.join(sizes)}.")
    return sizes[size]


def _check_no_pooler(model: BERTMaskedLM | BERTClassifier) -> None:
    if model.encoder.pooler:
        raise ValueError(f"{type(model).__name__}: the encoder has a pooler; pass one with pooler=False.")


ARCHITECTURES = {  # of transformers
    ("bert", "BERT"): "BertModel",
    ("bert", "BERTMaskedLM"): "BertForMaskedLM",
    ("bert", "BERTClassifier"): "BertForSequenceClassification",
    ("roberta", "BERT"): "RobertaModel",
    ("roberta", "BERTMaskedLM"): "RobertaForMaskedLM",
    ("roberta", "BERTClassifier"): "RobertaForSequenceClassification",
}


def _map_weights(
    family: str, head: Mapping[Any, Weight], *, other_heads: tuple[str, ...], tied: Mapping[str, str] | None = None
) -> WeightMap:
    """The map of an encoder and a head; what files hold for other heads is ignored."""
    block, layer = "blocks/stacked", f"{family}.encoder.layer.*"
    entries = {
        **map_embed("embed", f"{family}.embeddings.word_embeddings"),
        **map_embed("segments", f"{family}.embeddings.token_type_embeddings"),
        **map_embed("positions", f"{family}.embeddings.position_embeddings"),
        **map_norm("norm", f"{family}.embeddings.LayerNorm"),
        **map_linear(f"{block}/attend/query", f"{layer}.attention.self.query"),
        **map_linear(f"{block}/attend/key", f"{layer}.attention.self.key"),
        **map_linear(f"{block}/attend/value", f"{layer}.attention.self.value"),
        **map_linear(f"{block}/attend/out", f"{layer}.attention.output.dense"),
        **map_norm(f"{block}/norm1", f"{layer}.attention.output.LayerNorm"),
        **map_linear(f"{block}/up", f"{layer}.intermediate.dense"),
        **map_linear(f"{block}/down", f"{layer}.output.dense"),
        **map_norm(f"{block}/norm2", f"{layer}.output.LayerNorm"),
        **head,
    }
    current = WeightMap(
        entries,
        prefix=f"{family}.",
        ignored=(f"{family}.embeddings.position_ids", *other_heads),
        tied=tied or {},
    )
    return current._replace(others={"tensorflow": current._replace(entries=_old_names(entries))})


def _old_names(entries: Mapping[Any, Weight]) -> dict[Any, Weight]:
    """The names of norms in files that were converted from TensorFlow, such as Google's own."""

    def rename(weight: Weight) -> Weight:
        name = weight.name.replace("LayerNorm.weight", "LayerNorm.gamma")
        return weight._replace(name=name.replace("LayerNorm.bias", "LayerNorm.beta"))

    return {paths: rename(weight) for paths, weight in entries.items()}


def bert_from_config(config: Mapping[str, Any]) -> BERT | BERTMaskedLM | BERTClassifier:
    """The BERT, RoBERTa or XLM-RoBERTa that a config.json of Hugging Face describes, with the head of its architecture.

    BertModel is an encoder without a pooler: `dataclasses.replace(model, pooler=True)` has it.
    """
    fields = Config("bert", config)
    fields.require("hidden_act", "gelu", default="gelu")
    fields.require("position_embedding_type", "absolute", default="absolute")
    fields.require("is_decoder", False, default=False)
    fields.require("add_cross_attention", False, default=False)
    fields.require("tie_word_embeddings", True, default=True)
    width, hidden = fields.size("hidden_size", 768), fields.size("intermediate_size", 3072)
    is_bert = config.get("model_type", "bert") == "bert"
    encoder = BERT(
        vocabulary=fields.size("vocab_size", 30_522 if is_bert else 50_265),
        positions=fields.size("max_position_embeddings", 512),
        segments=fields.size("type_vocab_size", 2),
        width=width,
        depth=fields.size("num_hidden_layers", 12),
        heads=fields.size("num_attention_heads", 12),
        hidden=None if hidden == 4 * width else hidden,
        padding=None if is_bert else fields.size("pad_token_id", 1),
        dropout=fields.number("hidden_dropout_prob", 0.1),
        eps=fields.number("layer_norm_eps", 1e-12),
    )
    return _with_head(fields, encoder)


def _with_head(fields: Config, encoder: BERT) -> BERT | BERTMaskedLM | BERTClassifier:
    """The model of the architecture that a config.json names: one of transformers, such as BertForMaskedLM."""
    names = fields.fields.get("architectures") or ["BertModel"]
    name = str(names[0]) if isinstance(names, list) else str(names)
    if name.endswith(("ForMaskedLM", "ForPreTraining")):
        return BERTMaskedLM(encoder)
    if name.endswith("ForSequenceClassification"):
        labels = fields.fields.get("id2label")
        return BERTClassifier(
            encoder, classes=len(labels) if isinstance(labels, Mapping) else fields.size("num_labels", 2)
        )
    if name.endswith("Model"):
        return encoder
    known = ", ".join(ARCHITECTURES.values())
    raise ValueError(f"bert: the architecture is {name[:80]!r}, but must be one of {known}, or XLM-RoBERTa's.")
