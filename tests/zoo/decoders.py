"""Language models for tests of generation, whose random weights give texts that vary."""

import jax
import jax.numpy as jnp
import numpy as np

import mlax
from mlax import nn, zoo


@mlax.frozen
class Windowed(mlax.Composite):
    """A decoder with a sliding window, rotary positions and a KV cache in int8."""

    vocabulary: int = 23
    width: int = 16
    last_only: bool = False

    def parts(self):
        attend = nn.MultiHeadAttention(
            2, causal=True, window=5, rotary=nn.Rotary(), kernel_init=mlax.Normal(0.5), cache_dtype="int8"
        )
        return {
            "embed": nn.Embed(self.vocabulary, self.width, table_init=mlax.Normal(0.5)),
            "blocks": mlax.Repeat(Attending(attend), 1),
        }

    def wire(self, sub, tokens, lengths=None):
        x = sub.blocks(sub.embed(tokens), lengths)
        return sub.embed(x if not self.last_only or lengths is None else last(x, lengths))


@mlax.frozen
class Attending(mlax.Composite):
    """Attention with a residual connection."""

    attend: mlax.Layer

    def wire(self, sub, x, lengths=None):
        return x + sub.attend({"x": x, "lengths": lengths})


def last(x, lengths):
    return jnp.take_along_axis(x, jnp.maximum(lengths, 1)[:, None, None] - 1, axis=1)


def tiny_gpt2(seed=0, vocabulary=50, width=16, depth=2, factor=6.0):
    """A GPT-2 and trainables, `factor` times those of `init`, which would repeat one token."""
    model = zoo.GPT2(vocabulary=vocabulary, positions=64, width=width, depth=depth, heads=2)
    trainables, _ = model.init(jax.random.key(seed), model.example_input())
    return model, jax.tree.map(lambda leaf: factor * leaf if leaf.ndim > 1 else leaf, trainables)


def prompts(vocabulary, *lengths):
    """Tokens (b, t), padded on the right with a token that would show, and lengths (b,)."""
    rows = np.random.default_rng(0).integers(0, vocabulary, (len(lengths), max(lengths)))
    return jnp.asarray(rows, "int32"), jnp.asarray(lengths, "int32")


def with_nan(trainables):
    """Trainables whose final norm is NaN, and so are all logits."""
    return {**trainables, "norm": jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), trainables["norm"])}
