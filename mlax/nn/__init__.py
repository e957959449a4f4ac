"""The layers: weights plus one call into `ops`, and composites of such layers."""

from typing import Any

from mlax.nn._alpha_dropout import AlphaDropout
from mlax.nn._attention import Attention
from mlax.nn._batch_norm import BatchNorm
from mlax.nn._bias import Bias
from mlax.nn._bidirectional import Bidirectional
from mlax.nn._channel_dropout import ChannelDropout
from mlax.nn._conv import Conv
from mlax.nn._conv_lstm import ConvLSTMCell
from mlax.nn._conv_transpose import ConvTranspose
from mlax.nn._dropout import Dropout
from mlax.nn._elsewhere import no_such_layer
from mlax.nn._embed import Embed
from mlax.nn._flatten import Flatten, Reshape
from mlax.nn._global_pool import AdaptivePool, GlobalPool
from mlax.nn._glu import GLU
from mlax.nn._group_norm import GroupNorm
from mlax.nn._gru import GRUCell
from mlax.nn._instance_norm import InstanceNorm
from mlax.nn._layer_norm import LayerNorm
from mlax.nn._linear import Linear
from mlax.nn._lora import LoRA, merge_lora
from mlax.nn._lstm import ForgetBias, LSTMCell
from mlax.nn._mamba import Mamba
from mlax.nn._mgu import MGUCell
from mlax.nn._mlp import MLP
from mlax.nn._moe import MoE
from mlax.nn._multi_head_attention import MultiHeadAttention
from mlax.nn._patches import Patches
from mlax.nn._path_dropout import PathDropout
from mlax.nn._pool import MaxPool, MeanPool, Pool, SumPool
from mlax.nn._positions import LearnedPositions, SinusoidalPositions
from mlax.nn._relative_bias import RelativeBias
from mlax.nn._rms_norm import RMSNorm
from mlax.nn._rnn import RNNCell
from mlax.nn._rotary import LinearScaling, Llama3Scaling, NTKScaling, Rotary
from mlax.nn._scaler import Scaler
from mlax.nn._spectral_norm import SpectralNorm
from mlax.nn._stacked import Stacked
from mlax.nn._weight_norm import WeightNorm

__all__ = [
    "GLU",
    "MLP",
    "AdaptivePool",
    "AlphaDropout",
    "Attention",
    "BatchNorm",
    "Bias",
    "Bidirectional",
    "ChannelDropout",
    "Conv",
    "ConvLSTMCell",
    "ConvTranspose",
    "Dropout",
    "Embed",
    "Flatten",
    "ForgetBias",
    "GRUCell",
    "GlobalPool",
    "GroupNorm",
    "InstanceNorm",
    "LSTMCell",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "LoRA",
    "MGUCell",
    "Mamba",
    "MaxPool",
    "MeanPool",
    "MoE",
    "MultiHeadAttention",
    "NTKScaling",
    "Patches",
    "PathDropout",
    "Pool",
    "RMSNorm",
    "RNNCell",
    "RelativeBias",
    "Reshape",
    "Rotary",
    "Scaler",
    "SinusoidalPositions",
    "SpectralNorm",
    "Stacked",
    "SumPool",
    "WeightNorm",
    "merge_lora",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"mlax.nn has no {name}." if name.startswith("_") else no_such_layer(name, __all__))
