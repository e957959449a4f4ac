"""Rows of the models: a tiny one of each family and variation, and an input of odd sizes with a batch of 3."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mlax
from mlax import dtypes, nn, zoo
from tests.catalogue.row import Row


@dataclasses.dataclass(frozen=True, eq=False)
class ModelRow(Row):
    """A model and an input; it is compared with the original implementation in tests/zoo."""

    model: mlax.Layer
    x: Callable[[str], Any]  # takes the dtype, which integers ignore; batch axis first

    def init(self, dtype: str = "float32") -> tuple[mlax.Layer, Any, Any, Any]:
        """The model, an input, and its trainables and state: the same arrays each time."""
        return _initialized(self, dtype)


@functools.cache
def _initialized(row: ModelRow, dtype: str) -> tuple[mlax.Layer, Any, Any, Any]:
    trainables, state = jax.eval_shape(row.model.init, jax.random.key(0), row.x("float32"))
    draws = np.random.default_rng(0)

    def draw(leaf):  # `init` would compile a program for each shape
        scale = leaf.shape[-2] ** -0.5 if leaf.ndim > 1 else 1.0
        return jnp.asarray(draws.normal(0.0, scale, leaf.shape), dtype)

    def draw_positive(leaf):  # variances
        return jnp.asarray(draws.uniform(0.5, 1.5, leaf.shape), dtypes.cast(leaf, dtype).dtype)

    return row.model, row.x(dtype), jax.tree.map(draw, trainables), jax.tree.map(draw_positive, state)


def tokens(vocabulary: int, *lengths: int) -> Callable[[str], Any]:
    """Tokens (b, t), padded on the right, and their lengths (b,)."""
    rows = np.random.default_rng(0).integers(0, vocabulary, (len(lengths), max(lengths)))
    return lambda dtype: (jnp.asarray(rows, "int32"), jnp.asarray(lengths, "int32"))


def pair_of_tokens(vocabulary: int, lengths: tuple[int, ...], source: tuple[int, ...]) -> Callable[[str], Any]:
    """Tokens of a target and of a source, each with their lengths."""
    return lambda dtype: (*tokens(vocabulary, *lengths)(dtype), *tokens(vocabulary, *source)(dtype))


def images(*shape: int) -> Callable[[str], Any]:
    """Images (b, height, width, channels)."""
    return lambda dtype: jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


def noisy_images(classes: int, *shape: int) -> Callable[[str], Any]:
    """Images (b, height, width, channels), time steps (b,) and labels (b,)."""
    draws = np.random.default_rng(1)
    time, label = (draws.integers(0, n, shape[0]) for n in (1000, classes))
    return lambda dtype: (images(*shape)(dtype), jnp.asarray(time, "int32"), jnp.asarray(label, "int32"))


ENCODER = zoo.BERT(vocabulary=31, positions=16, width=16, depth=2, heads=2)
ROBERTA = zoo.BERT(vocabulary=31, positions=16, segments=1, width=16, depth=2, heads=2, hidden=24, padding=1)
TINY_T5 = zoo.T5(
    vocabulary=31, width=16, depth=1, decoder_depth=2, heads=2, head_width=6, hidden=24, feed_forward="gated-gelu"
)
LLAMA = {"vocabulary": 31, "width": 16, "hidden": 24, "heads": 4, "kv_heads": 2}
GEMMA = {
    "family": "gemma3_text",
    "windows": (3, None),
    "local_rotary": nn.Rotary(base=100.0),
    "head_width": 6,
    "norms": nn.RMSNorm(scale_offset=1.0, scale_init=mlax.Zeros()),
    "qk_norm": True,
    "post_norms": True,
    "logit_softcap": 3.0,
    "scaled_embed": True,
    "tied": True,
}
MIXTRAL = {"family": "mixtral", "windows": (3,), "experts": (3, 2)}
ROWS = {
    "BERT with a pooler": ModelRow(dataclasses.replace(ENCODER, pooler=True), tokens(31, 7, 3, 1)),
    "BERTMaskedLM": ModelRow(zoo.BERTMaskedLM(ENCODER), tokens(31, 7, 3, 1)),
    "SentenceEncoder": ModelRow(zoo.SentenceEncoder(ENCODER), tokens(31, 7, 3, 1)),
    "BERTClassifier of RoBERTa": ModelRow(zoo.BERTClassifier(ROBERTA, classes=3), tokens(31, 7, 3, 1)),
    "UNet": ModelRow(
        zoo.UNet(widths=(4, 8), attention=(False, True), layers=1, groups=2, classes=3), noisy_images(3, 3, 4, 6, 3)
    ),
    "VAE": ModelRow(zoo.VAE(widths=(4, 8), layers=1, groups=2, latent=2), images(3, 4, 6, 3)),
    "GPT2": ModelRow(zoo.GPT2(vocabulary=31, positions=16, width=16, depth=2, heads=2), tokens(31, 7, 3, 1)),
    "ConvNeXt": ModelRow(zoo.ConvNeXt(depths=(1, 2), widths=(8, 12), classes=5, drop_path=0.2), images(3, 9, 13, 3)),
    "ViT": ModelRow(
        zoo.ViT(image_size=(9, 13), patch=4, width=16, depth=2, heads=2, hidden=24, classes=5), images(3, 9, 13, 3)
    ),
    "ViT distilled": ModelRow(
        zoo.ViT(image_size=(9, 13), patch=4, width=16, depth=2, heads=2, hidden=24, classes=5, distilled=True),
        images(3, 9, 13, 3),
    ),
    "ResNet": ModelRow(zoo.ResNet(depths=(2,), widths=(12,), stem=8, classes=5), images(3, 17, 23, 3)),
    "ResNet basic": ModelRow(
        zoo.ResNet(depths=(1, 1), widths=(8, 12), block="basic", stem=8, classes=None), images(3, 17, 23, 3)
    ),
    "T5": ModelRow(TINY_T5, pair_of_tokens(31, (5, 2, 1), (3, 7, 1))),
    "LSTMLanguageModel": ModelRow(
        zoo.LSTMLanguageModel(vocabulary=31, width=8, dropout=0.1, tied=True), tokens(31, 7, 3, 1)
    ),
    "Llama": ModelRow(zoo.Llama(family="qwen2", bias=True, tied=True, **LLAMA, depth=2), tokens(31, 7, 3, 1)),
    "Llama as Gemma": ModelRow(zoo.Llama(**LLAMA, **GEMMA, depth=3), tokens(31, 7, 3, 1)),
    "Llama as Mixtral": ModelRow(zoo.Llama(**LLAMA, **MIXTRAL, depth=2), tokens(31, 7, 3, 1)),
}
