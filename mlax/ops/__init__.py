"""The mathematics of the layers: pure functions of arrays, without weights of their own."""

from mlax.ops._dropout import dropout
from mlax.ops._embed import embed
from mlax.ops._layer_norm import layer_norm
from mlax.ops._linear import linear
from mlax.ops._reduce import mean

__all__ = ["dropout", "embed", "layer_norm", "linear", "mean"]
