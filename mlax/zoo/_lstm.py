"""An LSTM language model. Zaremba et al., Recurrent Neural Network Regularization, https://arxiv.org/abs/1409.2329."""

from dataclasses import KW_ONLY
from typing import Any, Literal

import jax
import numpy as np

from mlax import nn
from mlax.core import Composite, Recurrent, Size, Sub, Uniform, frozen
from mlax.zoo._language import last_tokens
from mlax.zoo._weights import Weight, WeightMap, map_embed, map_linear


@frozen
class LSTMLanguageModel(Composite):
    """An LSTM language model: tokens (b, t), integers, to the logits (b, t, vocabulary) of each next token.

    The input may also be a pair with lengths (b,): how many tokens of each row are not padding, which is on the right.
    (tokens, lengths, labels), with the next tokens (b, t), gives their losses (b, t): see `nn.CrossEntropyHead`.
    Parts: embed; drop, of embeddings and of the output of each layer; layers, each a Recurrent of an LSTMCell; head, or
    bias if `tied`. The names of its weights are those of PyTorch's word_language_model example.

    For truncated backpropagation through time, `mlax.override(model, mlax.Recurrent, stateful=True)` keeps the final
    state of each call in non_trainables, from where the next one continues; `zoo.generate` does that by itself.

    >>> model = zoo.LSTMLanguageModel(vocabulary=50, width=8)
    >>> trainables, _ = model.init(jax.random.key(0), jnp.zeros((1, 5), "int32"))
    >>> model.fwd(jnp.zeros((3, 7), "int32"), trainables)[0].shape
    (3, 7, 50)
    """

    _: KW_ONLY
    vocabulary: Size = 10_000  # the number of tokens
    width: Size = 200  # of an embedding
    hidden: int | None = None  # the width of each layer; None: that of an embedding
    depth: Size = 2  # the number of layers
    dropout: float = 0.0  # of embeddings and of each layer's output
    tied: bool = False  # whether the table of embed is the kernel of the output layer, too
    last_only: bool = False  # whether to compute the logits of the last token of each row alone, (b, 1, vocabulary)

    def __post_init__(self):
        if self.tied and self.hidden not in (None, self.width):
            raise ValueError(
                f"LSTMLanguageModel: hidden is {self.hidden}, but a tied output layer needs the width, {self.width}."
            )

    def parts(self):
        hidden = self.hidden or self.width
        init = Uniform(hidden**-0.5)  # as in PyTorch
        cell = nn.LSTMCell(hidden, recurrent_bias=True, kernel_init=init, recurrent_init=init)
        head = nn.Linear(self.vocabulary, kernel_init=Uniform(0.1))
        return {
            "embed": nn.Embed(self.vocabulary, self.width, table_init=Uniform(0.1)),
            "drop": nn.Dropout(self.dropout),
            "layers": (Recurrent(cell, lengths=True),) * self.depth,
            **({"bias": nn.CrossEntropyHead(nn.Bias())} if self.tied else {"head": nn.CrossEntropyHead(head)}),
        }

    def wire(self, sub: Sub, tokens: Any, lengths: Any = None, labels: Any = None) -> Any:  # (b, t), (b,), (b, t)
        x = sub.drop(sub.embed(tokens))  # (b, t, d)
        for layer in sub.layers:
            x = sub.drop(layer(x, lengths))  # (b, t, f)
        x = last_tokens(x, lengths) if self.last_only and labels is None else x
        x = sub.embed(x) if self.tied else x
        x = x if labels is None else {"x": x, "labels": labels, "lengths": lengths}
        return sub.bias(x) if self.tied else sub.head(x)  # (b, t, v), or (b, t)

    def example_input(self) -> Any:
        return jax.ShapeDtypeStruct((1, 1), np.int32)

    def weight_map(self) -> WeightMap:
        entries = {**map_embed("embed", "encoder"), **map_linear("head", "decoder")}
        entries["bias/bias"] = Weight("decoder.bias")
        for number in range(self.depth):
            for part, name in {"input": "ih", "recurrent": "hh"}.items():
                path = f"layers/{number}/{part}"
                entries[f"{path}/kernel"] = Weight(f"rnn.weight_{name}_l{number}", (1, 0))
                entries[f"{path}/bias"] = Weight(f"rnn.bias_{name}_l{number}")
        return WeightMap(entries, tied={"decoder.weight": "encoder.weight"} if self.tied else {})


def lstm_lm(size: Literal["small", "medium", "large"] = "medium") -> LSTMLanguageModel:
    """An LSTM language model in a size of Zaremba et al. for the Penn Treebank: 4.7M, 19.8M or 66M parameters.

    >>> zoo.lstm_lm("large")
    LSTMLanguageModel(width=1500, dropout=0.65)
    """
    sizes = {"small": (200, 0.0), "medium": (650, 0.5), "large": (1500, 0.65)}
    if size not in sizes:
        raise ValueError(f"lstm_lm: the size is {size!r}, but must be one of {', '.join(sizes)}.")
    width, dropout = sizes[size]
    return LSTMLanguageModel(width=width, dropout=dropout)
