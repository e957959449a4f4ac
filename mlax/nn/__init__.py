"""The layers: weights plus one call into `ops`, and composites of layers."""

from typing import Any

from mlax.core import name_types as name_types
from mlax.nn._attention import MultiHeadAttention
from mlax.nn._conv import Conv, ConvTranspose
from mlax.nn._cross_entropy import CrossEntropyHead
from mlax.nn._dot_product_attention import Attention
from mlax.nn._dropout import AlphaDropout, ChannelDropout, Dropout, PathDropout
from mlax.nn._embed import Embed, EmbedBag
from mlax.nn._from_torch import from_torch, to_torch
from mlax.nn._kv_cache import KeyValueCache
from mlax.nn._linear import GLU, MLP, Bias, Linear, PReLU, Scaler
from mlax.nn._lora import LoRA, merge_lora
from mlax.nn._mamba import Mamba
from mlax.nn._moe import MoE
from mlax.nn._norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, LocalResponseNorm, RMSNorm
from mlax.nn._pool import AdaptivePool, GlobalPool, MaxPool, MeanPool, Pool, SumPool
from mlax.nn._positions import (
    DynamicNTKScaling,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    RelativeBias,
    Rotary,
    SinusoidalPositions,
    YaRNScaling,
)
from mlax.nn._quantize import QuantizedLinear, quantize
from mlax.nn._recurrent import ConvLSTMCell, ForgetBias, GRUCell, LSTMCell, MGUCell, RNNCell
from mlax.nn._recurrent_layers import Bidirectional, Stacked
from mlax.nn._reparam import SpectralNorm, WeightNorm
from mlax.nn._resample import PixelShuffle, PixelUnshuffle, Upsample
from mlax.nn._reshape import Flatten, Patches, Reshape
from mlax.nn._torch_names import missing_layer_message

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
    "CrossEntropyHead",
    "Dropout",
    "DynamicNTKScaling",
    "Embed",
    "EmbedBag",
    "Flatten",
    "ForgetBias",
    "GRUCell",
    "GlobalPool",
    "GroupNorm",
    "InstanceNorm",
    "KeyValueCache",
    "LSTMCell",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "LoRA",
    "LocalResponseNorm",
    "MGUCell",
    "Mamba",
    "MaxPool",
    "MeanPool",
    "MoE",
    "MultiHeadAttention",
    "NTKScaling",
    "PReLU",
    "Patches",
    "PathDropout",
    "PixelShuffle",
    "PixelUnshuffle",
    "Pool",
    "QuantizedLinear",
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
    "Upsample",
    "WeightNorm",
    "YaRNScaling",
    "from_torch",
    "merge_lora",
    "quantize",
    "to_torch",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"mlax.nn has no {name}." if name.startswith("_") else missing_layer_message(name, __all__))


name_types(globals())
