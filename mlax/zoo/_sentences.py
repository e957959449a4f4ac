"""SentenceEncoder: sentence embeddings, pooled from the hidden states of an encoder. https://arxiv.org/abs/1908.10084."""

import json
import math
import os
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from mlax import files, ops
from mlax.core import Composite, Layer, Sub, frozen, short_repr
from mlax.zoo._bert import BERT, BERTClassifier, BERTMaskedLM
from mlax.zoo._weights import WeightMap

Pooling = Literal["mean", "first", "max"]
MAX_BYTES = 1 << 16  # of each file about the pooling


@frozen
class SentenceEncoder(Composite):
    """Sentence embeddings: the hidden states (b, t, d) of an encoder, pooled over the valid tokens, to (b, d).

    The input is that of the encoder: tokens (b, t), or a tuple with lengths (b,), and segments (b, t) for BERT.
    Embeddings with `normalize` have the norm 1, so that a product of two is their cosine similarity.

    >>> model = zoo.SentenceEncoder(zoo.BERT(vocabulary=50, positions=16, width=8, depth=2, heads=2))
    >>> trainables, _ = model.init(jax.random.key(0), jnp.zeros((1, 5), "int32"))
    >>> model.fwd((jnp.zeros((3, 7), "int32"), jnp.array([7, 2, 5])), trainables)[0].shape
    (3, 8)
    """

    encoder: Layer  # (tokens, lengths, segments) to (b, t, d)
    _: KW_ONLY
    pooling: Pooling = "mean"  # "mean" or "max", over the valid tokens, or "first", the state of the first token
    normalize: bool = True  # whether to divide each embedding by its norm

    def __post_init__(self):
        if self.pooling not in get_args(Pooling):
            raise ValueError(f"SentenceEncoder: pooling is {self.pooling!r}, but must be mean, first or max.")

    def wire(self, sub: Sub, tokens: Any, lengths: Any = None, segments: Any = None) -> Any:  # (b, t), (b,), (b, t)
        inputs = (tokens, lengths) if segments is None else (tokens, lengths, segments)
        x = pool_tokens(sub.encoder(*inputs), lengths, self.pooling)  # (b, d)
        return ops.rms_norm(x, eps=1e-12) * (1 / math.sqrt(x.shape[-1])) if self.normalize else x

    def example_input(self) -> Any:
        encoder: Any = self.encoder
        return encoder.example_input()

    def weight_map(self) -> WeightMap:
        encoder: Any = self.encoder
        return _under_encoder(encoder.weight_map())

    def config(self) -> dict[str, Any]:
        """The config.json of the encoder; `zoo.save` writes the pooling into files of sentence-transformers."""
        encoder: Any = self.encoder
        return encoder.config()


def pool_tokens(x: Any, lengths: Any, pooling: Pooling) -> Any:
    """Pool hidden states over the tokens that are not padding, (b, t, d) to (b, d)."""
    if pooling == "first":
        return x[:, 0]
    if lengths is None:
        return x.max(1) if pooling == "max" else ops.mean(x, (1,))[:, 0]
    lengths = jnp.maximum(lengths.astype(np.int32), 1)[:, None]  # (b, 1)
    is_token = ops.default_positions(x.shape[1]) < lengths  # (b, t)
    if pooling == "max":
        return jnp.where(is_token[:, :, None], x, -jnp.inf).max(1)
    weights = is_token.astype(x.dtype) / lengths.astype(x.dtype)  # a product with these cannot overflow before the mean
    return jnp.einsum("btd,bt->bd", x, weights)


def _under_encoder(weight_map: WeightMap) -> WeightMap:
    """The map with the paths that the variables have here."""

    def nest(key: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return f"encoder/{key}" if isinstance(key, str) else tuple(f"encoder/{path}" for path in key)

    entries = {nest(key): weight for key, weight in weight_map.entries.items()}
    others = {name: _under_encoder(each) for name, each in weight_map.others.items()}
    return weight_map._replace(entries=entries, others=others)


MODULES = "modules.json"  # a list of modules, each with the folder of its configuration
POOLING = "1_Pooling"
MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
    "pooling_mode_max_tokens": "max",
}
KINDS = "sentence_transformers.models."


def with_pooling(folder: Path, model: Layer, within: Any = None) -> Layer:
    """The model of a folder as a SentenceEncoder, if the folder was written by sentence-transformers."""
    if not os.path.lexists(folder / MODULES):
        return model
    modules = _read_modules(folder, within)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or modules[0].get("path"):
        raise ValueError(
            f"{folder / MODULES}: the modules are {', '.join(kinds)[:200]}, but must be Transformer, Pooling and, if "
            "any, Normalize, the first of them in the same folder."
        )
    encoder = model.encoder if isinstance(model, BERTMaskedLM | BERTClassifier) else model
    if not isinstance(encoder, BERT):
        raise ValueError(
            f"{folder / MODULES}: sentence embeddings of {short_repr(model)} are not supported, only BERT's."
        )
    return SentenceEncoder(encoder, pooling=_read_mode(folder, modules[1], within), normalize=len(kinds) == 3)


def write_pooling(folder: str | os.PathLike[str], model: SentenceEncoder) -> None:
    """Write what `with_pooling` reads."""
    folder = Path(folder)
    kinds = {"": "Transformer", POOLING: "Pooling", **({"2_Normalize": "Normalize"} if model.normalize else {})}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": KINDS + kind}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    width = model.config()["hidden_size"]
    modes = {name: mode == model.pooling for name, mode in MODES.items()}
    files.make_folder(os.fspath(folder / POOLING))
    (folder / POOLING / "config.json").write_text(json.dumps({"word_embedding_dimension": width, **modes}, indent=2))
    (folder / MODULES).write_text(json.dumps(modules, indent=2))


def _read_modules(folder: Path, within: Any) -> list[dict[str, Any]]:
    modules = _read_json(folder, MODULES, within, b'{"modules": %s}')["modules"]  # an object, as parse_json wants
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise files.InvalidFile(f"{folder / MODULES}: it is not a list of objects.")
    return modules


def _read_mode(folder: Path, module: dict[str, Any], within: Any) -> Pooling:
    path = module.get("path")
    if not isinstance(path, str) or not path or path in (".", "..") or os.path.basename(path) != path or "\0" in path:
        raise files.InvalidFile(
            f"{folder / MODULES}: the path of the pooling is {str(path)[:80]!r}, not a folder here."
        )
    config = _read_json(folder, os.path.join(path, "config.json"), within)
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode") and value is True]
    if len(chosen) != 1 or chosen[0] not in MODES:
        raise ValueError(
            f"{folder / path}: the pooling is {', '.join(chosen)[:200] or 'missing'}, but must be one of "
            f"{', '.join(MODES)}."
        )
    return MODES[chosen[0]]


def _read_json(folder: Path, name: str, within: Any, template: bytes = b"%s") -> dict[str, Any]:
    path = os.fspath(folder / name)
    with files.safe_open(path, within, folder) as (file, size):
        if size > MAX_BYTES:
            raise files.InvalidFile(f"{path}: it has {size:,} bytes, and at most {MAX_BYTES:,} are allowed.")
        return files.parse_json(template % file.read(size), path, depth=8, items=1000)
