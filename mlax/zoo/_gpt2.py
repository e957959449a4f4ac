"""GPT-2: a decoder-only transformer with learned positions. Radford et al., Language Models are Unsupervised Multitask
Learners, 2019.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, Literal

import jax
import numpy as np

from mlax import nn, ops
from mlax.core import Composite, Normal, Repeat, Size, Sub, frozen
from mlax.zoo._config import Config
from mlax.zoo._language import last_tokens
from mlax.zoo._weights import Weight, WeightMap, map_embed, map_norm


@frozen
class GPT2(Composite):
    """GPT-2, a language model: tokens (b, t), integers, to the logits (b, t, vocabulary) of each next token.

    The input may also be a pair with lengths (b,): how many tokens of each row are not padding, which is on the right.
    (tokens, lengths, labels), with the next tokens (b, t), gives their losses (b, t): see `nn.CrossEntropyHead`.
    Parts: embed, whose table is the output layer, too; positions, drop, blocks, norm.

    >>> model = zoo.GPT2(vocabulary=50, positions=16, width=8, depth=2, heads=2)
    >>> trainables, _ = model.init(jax.random.key(0), jnp.zeros((1, 5), "int32"))
    >>> model.fwd(jnp.zeros((3, 7), "int32"), trainables)[0].shape
    (3, 7, 50)
    """

    _: KW_ONLY
    vocabulary: Size = 50_257  # the number of tokens
    positions: Size = 1024  # the longest sequence
    width: Size = 768  # of the residual stream
    depth: Size = 12  # the number of blocks
    heads: Size = 12  # of each attention
    dropout: float = 0.0  # of embeddings, attention weights and residual branches
    eps: float = 1e-5  # of the norms
    last_only: bool = False  # whether to compute the logits of the last token of each row alone, (b, 1, vocabulary)

    def parts(self):
        block = GPT2Block(width=self.width, heads=self.heads, dropout=self.dropout, eps=self.eps)
        return {
            "embed": nn.CrossEntropyHead(nn.Embed(self.vocabulary, self.width)),
            "positions": nn.LearnedPositions(self.positions, table_init=Normal(0.01)),
            "drop": nn.Dropout(self.dropout),
            "blocks": Repeat(block, self.depth),
            "norm": nn.LayerNorm(eps=self.eps),
        }

    def wire(self, sub: Sub, tokens: Any, lengths: Any = None, labels: Any = None) -> Any:  # (b, t), (b,), (b, t)
        x = sub.drop(sub.positions({"x": sub.embed(tokens), "lengths": lengths}))  # (b, t, d)
        x = sub.norm(sub.blocks(x, lengths))
        x = last_tokens(x, lengths) if self.last_only and labels is None else x
        return sub.embed(
            x if labels is None else {"x": x, "labels": labels, "lengths": lengths}
        )  # (b, t, v), or (b, t)

    def example_input(self) -> Any:
        return jax.ShapeDtypeStruct((1, 1), np.int32)

    def weight_map(self) -> WeightMap:
        return WEIGHTS

    def config(self) -> dict[str, Any]:
        """The config.json of Hugging Face's transformers."""
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": self.vocabulary,
            "n_positions": self.positions,
            "n_embd": self.width,
            "n_layer": self.depth,
            "n_head": self.heads,
            "embd_pdrop": self.dropout,
            "attn_pdrop": self.dropout,
            "resid_pdrop": self.dropout,
            "layer_norm_epsilon": self.eps,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
        }


@frozen
class GPT2Block(Composite):
    """A block of GPT-2: attention and an MLP, each after a layer norm and added to the residual stream."""

    _: KW_ONLY
    width: Size  # of the residual stream
    heads: Size  # of the attention
    dropout: float = 0.0  # of attention weights and residual branches
    eps: float = 1e-5  # of the norms

    def parts(self):
        return {
            "norm1": nn.LayerNorm(eps=self.eps),
            "attend": nn.MultiHeadAttention(self.heads, causal=True, dropout=self.dropout, kernel_init=Normal(0.02)),
            "norm2": nn.LayerNorm(eps=self.eps),
            "up": nn.Linear(4 * self.width, activation=ops.gelu, kernel_init=Normal(0.02)),
            "down": nn.Linear(self.width, kernel_init=Normal(0.02)),
            "drop": nn.Dropout(self.dropout),
        }

    def wire(self, sub: Sub, x: Any, lengths: Any = None) -> Any:  # (b, t, d), (b,)
        attended = {"x": x, "lengths": lengths}
        x, y = sub.norm1(x, None if self.dropout else sub.take_bias("attend", attended))
        x = x + sub.drop(sub.attend({**attended, "x": y}))
        x, y = sub.norm2(x, None if self.dropout else sub.take_bias("down", x))
        return x + sub.drop(sub.call_in_turn(y, "up", "down"))


def gpt2(size: Literal["small", "medium", "large", "xl"] = "small") -> GPT2:
    """GPT-2 in a published size: 124M, 355M, 774M or 1.5B parameters.

    >>> zoo.gpt2("medium")
    GPT2(width=1024, depth=24, heads=16)
    """
    sizes = {"small": (768, 12, 12), "medium": (1024, 24, 16), "large": (1280, 36, 20), "xl": (1600, 48, 25)}
    if size not in sizes:
        raise ValueError(f"gpt2: the size is {size!r}, but must be one of {', '.join(sizes)}.")
    width, depth, heads = sizes[size]
    return GPT2(width=width, depth=depth, heads=heads)


BLOCK = "blocks/stacked"
QKV = tuple(f"{BLOCK}/attend/{part}" for part in ("query", "key", "value"))
WEIGHTS = WeightMap(  # kernels are stored (in, out), since Hugging Face's GPT-2 is made of its Conv1D
    {
        **map_embed("embed", "transformer.wte"),
        **map_embed("positions", "transformer.wpe"),
        **map_norm(f"{BLOCK}/norm1", "transformer.h.*.ln_1"),
        tuple(f"{part}/kernel" for part in QKV): Weight("transformer.h.*.attn.c_attn.weight"),
        tuple(f"{part}/bias" for part in QKV): Weight("transformer.h.*.attn.c_attn.bias"),
        f"{BLOCK}/attend/out/kernel": Weight("transformer.h.*.attn.c_proj.weight"),
        f"{BLOCK}/attend/out/bias": Weight("transformer.h.*.attn.c_proj.bias"),
        **map_norm(f"{BLOCK}/norm2", "transformer.h.*.ln_2"),
        f"{BLOCK}/up/kernel": Weight("transformer.h.*.mlp.c_fc.weight"),
        f"{BLOCK}/up/bias": Weight("transformer.h.*.mlp.c_fc.bias"),
        f"{BLOCK}/down/kernel": Weight("transformer.h.*.mlp.c_proj.weight"),
        f"{BLOCK}/down/bias": Weight("transformer.h.*.mlp.c_proj.bias"),
        **map_norm("norm", "transformer.ln_f"),
    },
    prefix="transformer.",
    ignored=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),  # causal masks
    tied={"lm_head.weight": "transformer.wte.weight"},
)


def gpt2_from_config(config: Mapping[str, Any]) -> GPT2:
    """The GPT-2 that a config.json of Hugging Face describes."""
    fields = Config("gpt2", config)
    fields.require("activation_function", "gelu_new", "gelu_pytorch_tanh", default="gelu_new")  # the same function
    fields.require("tie_word_embeddings", True, default=True)
    fields.require("scale_attn_weights", True, default=True)
    fields.require("scale_attn_by_inverse_layer_idx", False, default=False)
    fields.require("add_cross_attention", False, default=False)
    fields.require("quantization_config", None, default=None)
    dropout = fields.number("resid_pdrop", 0.1)
    for name in ("embd_pdrop", "attn_pdrop"):
        if fields.number(name, dropout) != dropout:
            raise ValueError(f"gpt2: {name} is {config[name]}, but must be resid_pdrop, {dropout}.")
    width, inner = fields.size("n_embd", 768), config.get("n_inner")
    if inner not in (None, 4 * width):
        raise ValueError(f"gpt2: n_inner is {inner}, but only 4 * n_embd = {4 * width} is supported.")
    return GPT2(
        vocabulary=fields.size("vocab_size", 50_257),
        positions=fields.size("n_positions", 1024),
        width=width,
        depth=fields.size("n_layer", 12),
        heads=fields.size("n_head", 12),
        dropout=dropout,
        eps=fields.number("layer_norm_epsilon", 1e-5),
    )
