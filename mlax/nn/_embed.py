"""Embed and EmbedBag: tables of vectors, looked up by integers."""

from dataclasses import KW_ONLY
from typing import Any, Literal

import jax.numpy as jnp

from mlax import ops
from mlax._jax import named_key
from mlax.core import DType, Initializer, Layer, Normal, Size, frozen, short_repr, signature

Combine = Literal["sum", "mean", "max"]


@frozen
class Embed(Layer):
    """An embedding table (token embeddings), looked up by integers: (...) integers to (..., width), in the table's
    dtype.

    Called on vectors, floating (..., width), it is the output layer with tied weights: (..., vocabulary), the logits
    `x @ table.T`, in the same dtype. Trainables: table (vocabulary, width). An index outside of the vocabulary gives
    NaN. The row of the index `padding` is initially zero, and gets no gradient as an embedding.

    >>> layer, x = nn.Embed(1_000, 64), jnp.zeros((8, 20), "int32")
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 20, 64)
    """

    vocabulary: Size  # the number of rows of the table
    width: Size  # the size of an embedding
    _: KW_ONLY
    padding: int | None = None  # the index whose row is zero and gets no gradient
    table_init: Initializer = Normal(0.02)  # of the table
    param_dtype: DType = "float32"  # the input has no floating dtype to follow

    def __post_init__(self):
        _check_padding(self)

    def init(self, rng, x):
        if not self._is_vectors(x):
            _check_indices(self, x)
        return _init_table(self, rng), None

    def tensor_parallel_axes(self, number):
        return {"table": 0}

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        table = trainables["table"]
        if self._is_vectors(x):
            return ops.tied_logits(x, table), non_trainables
        return ops.embedding(x, table, padding=self.padding), non_trainables

    def _is_vectors(self, x: Any) -> bool:
        """Whether the input is what the table embeds to, and not integers."""
        return jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 1 and x.shape[-1] == self.width


@frozen
class EmbedBag(Layer):
    """A bag of embeddings: combine those of several integers, (..., n) integers to (..., width), in the table's dtype.

    `by` says how: their sum, mean or maximum. The index `padding` is left out, its row is initially zero and gets no
    gradient. The input may also be a pair of the integers and, in the same shape, booleans that say which of them
    count, or, for the sum, weights. Where none counts the output is zero. Trainables: table (vocabulary, width).

    >>> layer, x = nn.EmbedBag(1_000, 64, by="mean"), jnp.zeros((8, 20), "int32")
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 64)
    """

    vocabulary: Size  # the number of rows of the table
    width: Size  # the size of an embedding
    _: KW_ONLY
    by: Combine = "mean"  # "mean", "sum" or "max"
    padding: int | None = None  # an index that is left out
    table_init: Initializer = Normal(0.02)  # of the table
    param_dtype: DType = "float32"  # the input has no floating dtype to follow

    def __post_init__(self):
        _check_padding(self)

    def init(self, rng, x):
        indices, weights = _split_weights(x)
        _check_indices(self, indices)
        if weights is not None and weights.shape != indices.shape:
            raise ValueError(
                f"{short_repr(self)}: the weights have the shape {weights.shape}, but must have that of the integers, "
                f"{indices.shape}."
            )
        if indices.ndim == 0:
            raise ValueError(f"{short_repr(self)}: the input is a scalar but needs a last axis; reshape it to (1,).")
        return _init_table(self, rng), None

    def tensor_parallel_axes(self, number):
        return {"table": 0}

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        indices, weights = _split_weights(x)
        y = ops.embedding_bag(indices, trainables["table"], weights, by=self.by, padding=self.padding)
        return y, non_trainables


def _init_table(layer: Any, rng: Any) -> dict[str, Any]:
    shape = (layer.vocabulary, layer.width)
    table = layer.table_init(named_key(rng, "table"), shape, layer.param_dtype)
    return {"table": table if layer.padding is None else table.at[layer.padding].set(0.0)}


def _check_padding(layer: Any) -> None:
    if layer.padding is not None and not 0 <= layer.padding < (layer.vocabulary or 1):
        raise ValueError(
            f"{type(layer).__name__}: padding is {layer.padding}, but must be an index from 0 to "
            f"{layer.vocabulary - 1}."
        )


def _check_indices(layer: Any, x: Any) -> None:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{short_repr(layer)}: the input is {signature(x)}, but must be integers; cast it to int32.")


def _split_weights(x: Any) -> tuple[Any, Any]:
    return x if isinstance(x, tuple) and len(x) == 2 else (x, None)
