"""Llama and its relatives: decoder-only transformers with rotary positions (RoPE), grouped-query attention (GQA) and
SwiGLU. Mistral, Qwen, Gemma, Mixtral and Phi-3 differ in a few fields. https://arxiv.org/abs/2307.09288
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY
from typing import Any, Literal

import jax
import numpy as np

from mlax import nn, ops
from mlax.core import Chain, Composite, Layer, Normal, Repeat, Size, Sub, frozen
from mlax.zoo._language import last_tokens
from mlax.zoo._llama_config import read_fields, write_config
from mlax.zoo._weights import Weight, WeightMap, map_embed, map_linear, map_norm

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mixtral", "phi3"]
Activation = Callable[[jax.Array], jax.Array]
Windows = tuple[int | None, ...]


@frozen
class Llama(Composite):
    """Llama, a language model: tokens (b, t), integers, to the logits (b, t, vocabulary) of each next token.

    The input may also be a pair with lengths (b,): how many tokens of each row are not padding, which is on the right.
    (tokens, lengths, labels), with the next tokens (b, t), gives their losses (b, t): see `nn.CrossEntropyHead`.
    Parts: embed; blocks, the layers; rest, those of an incomplete pattern of `windows`; norm; head, unless `tied`.
    >>> model = zoo.Llama(vocabulary=50, width=16, hidden=32, depth=2, heads=4, kv_heads=2, windows=(8, None))
    >>> trainables, _ = model.init(jax.random.key(0), model.example_input())
    """

    _: KW_ONLY
    family: Family = "llama"  # whose names and config.json its weights have: the model_type
    vocabulary: Size = 32_000  # the number of tokens
    positions: Size = 4096  # the longest sequence in training, and in generation
    width: Size = 4096  # of the residual stream
    hidden: Size = 11_008  # of an MLP, or of an expert
    depth: Size = 32  # the number of layers
    heads: Size = 32  # of the queries
    kv_heads: int | None = None  # of keys and values; None: heads
    head_width: int | None = None  # None: width / heads
    windows: Windows = (None,)  # of local attention, repeated over the layers; None: full attention
    rotary: nn.Rotary = nn.Rotary()  # positions
    local_rotary: nn.Rotary | None = None  # of layers with a window; None: rotary
    activation: Activation = jax.nn.silu  # of the gate
    bias: bool = False  # of query, key and value
    out_bias: bool = False  # of the output of attention
    norms: nn.RMSNorm = nn.RMSNorm(eps=1e-5)  # each norm, before attention, MLP and head
    qk_norm: bool = False  # whether to normalize each head of queries and keys, too
    post_norms: bool = False  # whether to normalize what is added to the residual stream, too
    scale: float | None = None  # of attention scores; None: 1 / sqrt(head_width)
    softcap: float | None = None  # c maps an attention score x to c * tanh(x / c)
    logit_softcap: float | None = None  # the same, of the logits
    scaled_embed: bool = False  # whether embeddings are multiplied by sqrt(width)
    tied: bool = False  # whether the embedding is the output layer, too
    padding: int | None = None  # the token whose embedding gets no gradient
    experts: tuple[int, int] | None = None  # in place of each MLP, and of them for each token
    last_only: bool = False  # whether to compute the logits of the last token alone

    def __post_init__(self):
        if not self.windows or not all(window is None or window >= 1 for window in self.windows):
            raise ValueError(
                f"Llama: windows is {self.windows!r}, but must be a tuple of sizes with at least one entry; None is "
                "full attention."
            )

    def parts(self):
        blocks = [self._block(window) for window in self.windows[: self.depth]]
        times, left = divmod(self.depth, len(blocks))
        rest = {"rest": Chain(tuple(blocks[:left]))} if left else {}
        embed = nn.Embed(self.vocabulary, self.width, padding=self.padding)
        head = nn.Linear(self.vocabulary, bias=False, kernel_init=Normal(0.02))
        return {
            "embed": self._with_loss(embed) if self.tied else embed,
            "blocks": Repeat(Chain(tuple(blocks)) if len(blocks) > 1 else blocks[0], times),
            **rest,
            "norm": self.norms,
            **({} if self.tied else {"head": self._with_loss(head)}),
        }

    def _with_loss(self, head: Layer) -> nn.CrossEntropyHead:
        return nn.CrossEntropyHead(head, softcap=self.logit_softcap)

    def wire(self, sub: Sub, tokens: Any, lengths: Any = None, labels: Any = None) -> Any:  # (b, t), (b,), (b, t)
        x = sub.embed(tokens)  # (b, t, d)
        x = x * math.sqrt(self.width) if self.scaled_embed else x
        x = sub.blocks(x, lengths)
        if self.depth % len(self.windows[: self.depth]):
            x = sub.rest(x, lengths)
        x = sub.norm(last_tokens(x, lengths) if self.last_only and labels is None else x)
        x = x if labels is None else {"x": x, "labels": labels, "lengths": lengths}
        return sub.embed(x) if self.tied else sub.head(x)  # (b, t, v), or (b, t)

    def _block(self, window: int | None) -> "LlamaBlock":
        attend = nn.MultiHeadAttention(
            self.heads,
            kv_heads=self.kv_heads,
            head_width=self.head_width,
            causal=True,
            window=window,
            softcap=self.softcap,
            rotary=self.rotary if window is None or self.local_rotary is None else self.local_rotary,
            qk_norm=self.norms if self.qk_norm else None,
            scale=self.scale,
            bias=self.bias,
            out_bias=self.out_bias,
            kernel_init=Normal(0.02),
        )
        mlp = LlamaMLP(self.width, self.hidden, activation=self.activation)
        mlp = mlp if self.experts is None else LlamaExperts(mlp, *self.experts)
        post_norm = self.norms if self.post_norms else None
        return LlamaBlock(self.norms, attend, self.norms, mlp, attend_norm=post_norm, mlp_norm=post_norm)

    def example_input(self) -> Any:
        return jax.ShapeDtypeStruct((1, 1), np.int32)

    def weight_map(self) -> WeightMap:
        return _weight_map(self)

    def config(self) -> dict[str, Any]:
        return write_config(self)


@frozen
class LlamaBlock(Composite):
    """A layer of Llama: attention and an MLP, each after a norm, and in Gemma 2 and 3 before another."""

    norm1: Layer  # before the attention
    attend: Layer  # to earlier tokens
    norm2: Layer  # before the MLP
    mlp: Layer  # or experts
    attend_norm: Layer | None = None  # after the attention
    mlp_norm: Layer | None = None  # after the MLP

    def wire(self, sub: Sub, x: Any, lengths: Any = None) -> Any:  # (b, t, d), (b,)
        y = sub.attend({"x": sub.norm1(x), "lengths": lengths})
        x = x + (y if self.attend_norm is None else sub.attend_norm(y))
        y = sub.mlp(sub.norm2(x))
        return x + (y if self.mlp_norm is None else sub.mlp_norm(y))


@frozen
class LlamaMLP(Composite):
    """A gated MLP: SwiGLU in Llama, GeGLU in Gemma."""

    width: Size  # of the output
    hidden: Size  # of the gated product
    _: KW_ONLY
    activation: Activation = jax.nn.silu  # of the gate

    def parts(self):
        sizes = {"gate": self.hidden, "up": self.hidden, "down": self.width}
        return {name: nn.Linear(size, bias=False, kernel_init=Normal(0.02)) for name, size in sizes.items()}

    def wire(self, sub: Sub, x: Any) -> Any:  # (..., d)
        return sub.down(ops.glu(sub.gate(x), sub.up(x), self.activation))


@frozen
class LlamaExperts(Composite):
    """Mixtral's mixture of experts, which drops no token: the output of nn.MoE without its losses.

    For training, `mlax.capture(model, "**/moe")` also returns the losses of all layers.
    """

    expert: LlamaMLP  # each of them
    experts: Size  # how many
    k: Size  # experts of each token

    def parts(self):
        return {"moe": nn.MoE(self.expert, self.experts, k=self.k, capacity_factor=None)}

    def wire(self, sub: Sub, x: Any) -> Any:  # (b, t, d)
        y, _ = sub.moe(x)
        return y


def _weight_map(model: Llama) -> WeightMap:
    """Names as transformers writes them to files; those of its modules differ for Mixtral, whose experts it fuses."""
    modules = {"modules": _map_model(model, _map_fused_experts)} if model.experts else {}
    return _map_model(model, _map_experts if model.experts else _map_mlp)._replace(others=modules)


def _map_model(model: Llama, map_mlp: Callable[..., dict[Any, Weight]]) -> WeightMap:
    return WeightMap(
        {
            **map_embed("embed", "model.embed_tokens"),
            **_map_blocks(model, map_mlp),
            **map_norm("norm", "model.norm"),
            **map_linear("head", "lm_head"),
        },
        prefix="model.",
        ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),
        tied={"lm_head.weight": "model.embed_tokens.weight"} if model.tied else {},
    )


def _map_blocks(model: Llama, map_mlp: Callable[..., dict[Any, Weight]]) -> dict[Any, Weight]:
    """The entries of all layers, of which those at one place of the pattern are stacked."""
    pattern = len(model.windows[: model.depth])
    if pattern == 1:
        return _map_block(model, "blocks/stacked", "model.layers.*", map_mlp)
    entries: dict[Any, Weight] = {}
    for place in range(pattern):
        stack = _map_block(model, f"blocks/stacked/layers/{place}", "model.layers.*", map_mlp)
        entries |= {path: weight._replace(start=place, step=pattern) for path, weight in stack.items()}
    first = model.depth - model.depth % pattern
    for place in range(model.depth - first):
        entries |= _map_block(model, f"rest/layers/{place}", f"model.layers.{first + place}", map_mlp)
    return entries


def _map_block(model: Llama, path: str, module: str, map_mlp: Callable[..., dict[Any, Weight]]) -> dict[Any, Weight]:
    second = "pre_feedforward_layernorm" if model.post_norms else "post_attention_layernorm"
    return {
        **map_norm(f"{path}/norm1", f"{module}.input_layernorm"),
        **(_map_fused_qkv if model.family == "phi3" else _map_qkv)(f"{path}/attend", f"{module}.self_attn"),
        **map_norm(f"{path}/attend/query_norm", f"{module}.self_attn.q_norm"),
        **map_norm(f"{path}/attend/key_norm", f"{module}.self_attn.k_norm"),
        **map_linear(f"{path}/attend/out", f"{module}.self_attn.o_proj"),
        **map_norm(f"{path}/attend_norm", f"{module}.post_attention_layernorm"),
        **map_norm(f"{path}/norm2", f"{module}.{second}"),
        **(_map_fused_mlp if model.family == "phi3" else map_mlp)(f"{path}/mlp", module),
        **map_norm(f"{path}/mlp_norm", f"{module}.post_feedforward_layernorm"),
    }


def _map_qkv(path: str, module: str) -> dict[Any, Weight]:
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    entries = [map_linear(f"{path}/{part}", f"{module}.{name}") for part, name in names.items()]
    return {key: weight for each in entries for key, weight in each.items()}


def _map_fused_qkv(path: str, module: str) -> dict[Any, Weight]:
    leaves = tuple(f"{path}/{part}/kernel" for part in ("query", "key", "value"))
    return {leaves: Weight(f"{module}.qkv_proj.weight", (1, 0))}


def _map_mlp(path: str, module: str) -> dict[Any, Weight]:
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    entries = [map_linear(f"{path}/{part}", f"{module}.mlp.{name}") for part, name in names.items()]
    return {key: weight for each in entries for key, weight in each.items()}


def _map_fused_mlp(path: str, module: str) -> dict[Any, Weight]:
    fused = {(f"{path}/gate/kernel", f"{path}/up/kernel"): Weight(f"{module}.mlp.gate_up_proj.weight", (1, 0))}
    return {**fused, **map_linear(f"{path}/down", f"{module}.mlp.down_proj")}


def _map_experts(path: str, module: str) -> dict[Any, Weight]:
    module, stack = f"{module}.block_sparse_moe", f"{path}/moe/experts/stacked"
    return {
        f"{path}/moe/router/kernel": Weight(f"{module}.gate.weight", (1, 0)),
        f"{stack}/gate/kernel": Weight(f"{module}.experts.*.w1.weight", (1, 0)),
        f"{stack}/up/kernel": Weight(f"{module}.experts.*.w3.weight", (1, 0)),
        f"{stack}/down/kernel": Weight(f"{module}.experts.*.w2.weight", (1, 0)),
    }


def _map_fused_experts(path: str, module: str) -> dict[Any, Weight]:
    module, stack = f"{module}.mlp", f"{path}/moe/experts/stacked"
    gate_and_up = (f"{stack}/gate/kernel", f"{stack}/up/kernel")
    return {
        f"{path}/moe/router/kernel": Weight(f"{module}.gate.weight", (1, 0)),
        gate_and_up: Weight(f"{module}.experts.gate_up_proj", (0, 2, 1)),
        f"{stack}/down/kernel": Weight(f"{module}.experts.down_proj", (0, 2, 1)),
    }


def llama_from_config(config: Mapping[str, Any]) -> Llama:
    """The Llama that a config.json of Hugging Face describes: of Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, Mixtral or
    Phi-3.
    """
    return Llama(**read_fields(config))
