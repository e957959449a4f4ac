"""The layers: weights plus one call into `ops`."""

from mlax.nn._bias import Bias
from mlax.nn._dropout import Dropout
from mlax.nn._embed import Embed
from mlax.nn._layer_norm import LayerNorm
from mlax.nn._linear import Linear
from mlax.nn._scaler import Scaler

__all__ = ["Bias", "Dropout", "Embed", "LayerNorm", "Linear", "Scaler"]
